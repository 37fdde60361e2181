"""All numbers of a training run in one frozen dataclass: the model's sizes, the data, the stages, the learning
rates."""

from __future__ import annotations

import dataclasses

from kvjax.model.config import ModelConfig, uniform_config
from kvjax.model.layers import RopeScaling
from kvjax.model.rope import mscale

WARM_UP = {"repeats": 0.6, "recall": 0.4}
MIXTURE = {"needles": 0.45, "records": 0.25, "text": 0.20, "recall": 0.05, "repeats": 0.05}
# At these lengths one sequence of records has thousands of answers, and would outweigh the few needles of the other
# sequences.
LONG_MIXTURE = {"needles": 0.60, "records": 0.12, "text": 0.20, "recall": 0.04, "repeats": 0.04}
# The loss of a batch is one weighted mean. A sequence of records, recall or repeats weighs several times as much as one
# of needles. If these kinds were as frequent as above, needles would hardly count in most batches of four or eight.
FAR_MIXTURE = {"far": 0.45, "needles": 0.37, "text": 0.12, "records": 0.02, "recall": 0.02, "repeats": 0.02}


@dataclasses.dataclass(frozen=True)
class Stage:
    """`steps` steps of `batch` sequences of `length` tokens; mixture: the share of each kind of sample (see
    `mixture.Mixture`)."""

    length: int
    batch: int
    steps: int
    mixture: dict[str, float]

    def __post_init__(self):
        if min(self.length, self.batch, self.steps) < 1:
            raise ValueError(f"length, batch and steps must be positive, got {self.length}, {self.batch}, {self.steps}")
        if abs(sum(self.mixture.values()) - 1) > 1e-6:
            raise ValueError(f"the shares of a mixture must sum to 1, got {self.mixture}")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A Qwen2-style decoder and its length curriculum.

    matrix_rate, other_rate: peak learning rates of Muon (matrices) and Adam (embedding, norms, biases). Both warm up
    over the first fortieth of all steps, and fall linearly to a twentieth of the peak over the last `decay` (a share of
    the steps). text_weight, answer_weight: loss weights of running text and of tokens that repeat earlier ones.
    key_letters: letters of the shortest word in a key. evaluate_every, checkpoint_every: steps; both also happen at the
    end of each stage. distractors: needles besides the target in an evaluated haystack (fewer while short lengths are
    trained). final_lengths, final_trials: of the evaluation after the last step. start: a model with weights of these
    sizes and a tokenizer, which training goes on from; None: training begins with `structured_params`. rope_scaling:
    how the positions of the model to start from are stretched; None: not at all.
    """

    name: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rope_theta: float
    max_positions: int
    stages: tuple[Stage, ...]
    compute_dtype: str = "bfloat16"
    matrix_rate: float = 0.01
    other_rate: float = 3e-3
    decay: float = 0.4
    text_weight: float = 0.3
    answer_weight: float = 4.0
    key_letters: int = 4
    seed: int = 0
    evaluate_every: int = 100
    evaluate_trials: int = 48
    checkpoint_every: int = 500
    distractors: int = 16
    final_lengths: tuple[int, ...] = (8192, 16384, 32768)
    final_trials: int = 200
    start: str | None = None
    rope_scaling: RopeScaling | None = None

    @property
    def steps(self) -> int:
        """Number of steps of all stages together."""
        return sum(s.steps for s in self.stages)

    def stage(self, step: int) -> Stage:
        """The stage that step number `step` (from 0) belongs to."""
        for stage in self.stages:
            if step < stage.steps:
                return stage
            step -= stage.steps
        raise ValueError(f"the recipe ends {step} steps before the step asked for")

    def stage_ends(self) -> set[int]:
        """The number of steps done at the end of each stage."""
        done, ends = 0, set()
        for stage in self.stages:
            done += stage.steps
            ends.add(done)
        return ends

    def tokens(self, steps: int) -> int:
        """Tokens seen after `steps` steps."""
        seen = 0
        for stage in self.stages:
            seen += min(steps, stage.steps) * stage.length * stage.batch
            steps = max(0, steps - stage.steps)
        return seen

    def model_config(self) -> ModelConfig:
        """The configuration of the decoder: Qwen2 style (QKV bias), tied embeddings, <|endoftext|> ends a text."""
        return uniform_config(
            family="qwen2",
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.num_layers,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_dim=self.head_dim,
            rope_theta=self.rope_theta,
            rope_scaling=self.rope_scaling,
            norm_eps=1e-6,
            tie_embeddings=True,
            max_positions=self.max_positions,
            compute_dtype=self.compute_dtype,
            qkv_bias=True,
            eos_token_ids=(0,),
        )


NEEDLE = Recipe(
    name="needle",
    vocab_size=4096,
    hidden_size=384,
    intermediate_size=1024,
    num_layers=6,
    num_heads=8,
    num_kv_heads=2,
    head_dim=64,
    rope_theta=1e6,
    max_positions=32768,
    stages=(
        Stage(256, 256, 300, WARM_UP),
        Stage(512, 128, 900, MIXTURE),
        Stage(2048, 32, 700, MIXTURE),
        Stage(8192, 8, 700, MIXTURE),
        Stage(16384, 4, 500, LONG_MIXTURE),
        Stage(32768, 2, 1100, LONG_MIXTURE),
    ),
)

# Training goes on from the embedded model. It finds a needle's key by rotated pairs that hardly turn: 12 of the 32
# pairs of a head turn less than once in the 32,768 tokens that it was trained for. In 131,072 tokens four of these turn
# more than once, and one more than half a turn: a key that is far back would no longer match. YaRN slows exactly the 12
# by four, so that in 131,072 tokens they turn as far as they did in 32,768, keeps the 12 fastest, by which the model
# finds neighbours, and blends the 8 between. (Another base, 4.2 times as large, would turn the fastest of the 12 1.6
# times as far as they did, and change the fast pairs too.) The attention factor is YaRN's own: logits 1.3 times as
# large, because four times as many keys share the attention.
#
# Rates are half of those of the embedded model: there is little to learn, a step has up to 524,288 tokens, and steps
# are few. The last stage is for shorter prompts. It is short, at low rates, so that the longest ones lose little by it.
NEEDLE_128K = dataclasses.replace(
    NEEDLE,
    name="needle-128k",
    start="needle",
    max_positions=131_072,
    rope_scaling=RopeScaling("yarn", 4.0, NEEDLE.max_positions, attention_factor=mscale(4.0, 1.0)),
    stages=(Stage(65_536, 4, 60, FAR_MIXTURE), Stage(131_072, 4, 160, FAR_MIXTURE), Stage(32_768, 8, 24, FAR_MIXTURE)),
    matrix_rate=0.005,
    other_rate=1.5e-3,
    text_weight=0.1,
    evaluate_every=120,
    checkpoint_every=40,
    final_lengths=(8192, 16_384, 32_768, 65_536, 131_072),
)

TOY = Recipe(
    name="toy",
    vocab_size=1024,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e5,
    max_positions=1024,
    stages=(Stage(64, 32, 200, WARM_UP), Stage(128, 16, 200, MIXTURE), Stage(256, 8, 100, MIXTURE)),
    compute_dtype="float32",
    key_letters=3,
    evaluate_trials=16,
    checkpoint_every=200,
    distractors=4,
    final_lengths=(256,),
    final_trials=32,
)

PRESETS = {"needle": NEEDLE, "needle-128k": NEEDLE_128K, "toy": TOY}
