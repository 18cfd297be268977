// One step's layout, as AttentionMetadata holds it, and where keys and values lie.

#pragma once

#include <cstdint>

struct Step {
    int64_t sequences;
    const int64_t* query_start_loc;  // [sequences + 1]
    const int64_t* seq_lens;         // [sequences], queries are the last tokens
    const int64_t* table_rows;       // [sequences]
    const int64_t* block_table;      // [any][table_width]
    int64_t table_width;
    int64_t block_size;

    const int64_t* blocks(int64_t sequence) const {
        return block_table + table_rows[sequence] * table_width;
    }
    int64_t slot(const int64_t* row, int64_t position) const {
        if (block_size == 1) return row[position];
        return row[position / block_size] * block_size + position % block_size;
    }
};

struct Heads {
    int64_t query, key_value, head_dim;  // head_dim is a multiple of 16

    int64_t group() const { return query / key_value; }
};

// The vector of (key/value head h, slot s) is at base + h * head_stride + s * slot_stride.
struct Slots {
    int64_t head_stride, slot_stride;
};
