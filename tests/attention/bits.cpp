// Prints a checksum of what every forward kernel computes of fixed numbers, one line each.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "attention/native/step.h"

using Floats = std::vector<float>;

extern "C" {
void linear(const float* x, int64_t rows, int64_t depth, const float* w, int64_t width,
            const float* bias, float* out);
void add_rms_norm(const float* x, const float* delta, const float* weight, int64_t rows,
                  int64_t size, float eps, float* total, float* out);
void silu_mul(const float* gate_up, int64_t rows, int64_t size, float* out);
void rotate(const float* qkv, int64_t tokens, int64_t heads, int64_t kv_heads, int64_t dim,
            const int64_t* positions, const float* cos, const float* sin, const float* q_weight,
            const float* k_weight, float eps, float* q, float* k);
void log_normalizers(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                     float* lse, float* entropy);
void sample_rows(const float* logits, int64_t rows, int64_t vocab, const float* temperature,
                 const uint8_t* greedy, const double* uniform, int64_t* tokens, float* logprobs,
                 float* lse);
void attend(const Step* step, const Heads* heads, const Slots* slots, const float* q,
            int64_t q_stride, const float* keys, const float* values, float scale, float* out,
            float* lse);
}

// Marsaglia's xorshift (2003), as floats in [-2, 2).
uint64_t state = 88172645463325252ull;
float number() {
    state ^= state << 13;
    state ^= state >> 7;
    state ^= state << 17;
    return static_cast<float>(static_cast<double>(state >> 40) / (1 << 24) * 4 - 2);
}

Floats numbers(int64_t size) {
    Floats values(size);
    for (float& value : values) value = number();
    return values;
}

// FNV-1a of the bytes.
template <class T>
void print(const char* name, const std::vector<T>& values) {
    uint64_t hash = 14695981039346656037ull;
    const auto* bytes = reinterpret_cast<const unsigned char*>(values.data());
    for (size_t i = 0; i < values.size() * sizeof(T); i++) hash = (hash ^ bytes[i]) * 1099511628211ull;
    std::printf("%s %016llx\n", name, static_cast<unsigned long long>(hash));
}

void products() {
    const int64_t shapes[][2] = {{96, 331}, {1100, 50}, {576, 64}};
    for (int64_t rows : {1, 5, 64, 70, 300})
        for (const auto& [depth, width] : shapes) {
            Floats x = numbers(rows * depth), w = numbers(depth * width), bias = numbers(width);
            Floats out(rows * width);
            linear(x.data(), rows, depth, w.data(), width, bias.data(), out.data());
            print("linear", out);
        }
}

void row_operations() {
    const int64_t rows = 70, size = 331;
    Floats x = numbers(rows * size), delta = numbers(rows * size), weight = numbers(size);
    Floats total(rows * size), out(rows * size), gate_up = numbers(2 * rows * size);
    add_rms_norm(x.data(), delta.data(), weight.data(), rows, size, 1e-5f, total.data(), out.data());
    print("add_rms_norm", out);
    silu_mul(gate_up.data(), rows, size, out.data());
    print("silu_mul", out);

    const int64_t tokens = 9, heads = 4, kv_heads = 2, dim = 64;
    Floats qkv = numbers(tokens * (heads + 2 * kv_heads) * dim), q_weight = numbers(dim);
    Floats cos = numbers(tokens * dim), sin = numbers(tokens * dim), k_weight = numbers(dim);
    Floats q(tokens * heads * dim), k(tokens * kv_heads * dim);
    std::vector<int64_t> positions;
    for (int64_t i = 0; i < tokens; i++) positions.push_back(i);
    rotate(qkv.data(), tokens, heads, kv_heads, dim, positions.data(), cos.data(), sin.data(),
           q_weight.data(), k_weight.data(), 1e-6f, q.data(), k.data());
    print("rotate, queries", q);
    print("rotate, keys", k);
}

void vocabulary() {
    const int64_t rows = 7, vocab = 5003;
    Floats logits = numbers(rows * vocab), temperature(rows, 0.7f), lse(rows), entropy(rows);
    log_normalizers(logits.data(), rows, vocab, temperature.data(), lse.data(), entropy.data());
    print("log_normalizers", lse);
    print("entropy", entropy);
    std::vector<uint8_t> greedy(rows, 0);
    std::vector<double> uniform(rows);
    for (double& u : uniform) u = (number() + 2.5) / 5;
    std::vector<int64_t> tokens(rows);
    Floats logprobs(rows);
    sample_rows(logits.data(), rows, vocab, temperature.data(), greedy.data(), uniform.data(),
                tokens.data(), logprobs.data(), lse.data());
    print("sampled tokens", tokens);
    print("their log-probs", logprobs);
}

// Two decodes that share a prompt and a prefill of ten tokens.
void attention() {
    const int64_t starts[] = {0, 1, 2, 12}, lens[] = {40, 37, 30}, rows[] = {0, 1, 2};
    const int64_t table[] = {0, 1, 2, 0, 1, 3, 4, 5, 0};
    const int64_t tokens = 12, heads = 6, kv_heads = 2, slots = 6 * 16;
    for (int64_t dim : {64, 80, 128}) {
        const Step step{3, starts, lens, rows, table, 3, 16};
        const Heads layout{heads, kv_heads, dim};
        const Slots strides{slots * dim, dim};
        Floats q = numbers(tokens * heads * dim), keys = numbers(kv_heads * slots * dim);
        Floats values = numbers(kv_heads * slots * dim), out(tokens * heads * dim), lse(tokens * heads);
        attend(&step, &layout, &strides, q.data(), heads * dim, keys.data(), values.data(), 0.125f,
               out.data(), lse.data());
        print("attend", out);
        print("its log-normalizers", lse);
    }
}

int main() {
    products();
    row_operations();
    vocabulary();
    attention();
}
