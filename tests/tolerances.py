"""Every tolerance of the suite, each with its reason. Differences are max|a - b| / max|b| per tensor unless said."""

from archon.tools.check.parity import FP32_TOLERANCE

# Parity with transformers in float32; its reason stands with it.
PARITY_FP32 = FP32_TOLERANCE
# The same of float64 models: archon keeps the frequencies of RoPE in float32, and what is left of that in a gradient is
# 9.6e-7.
PARITY_FP64 = 2e-6

# A closed formula against a plain loop over Python floats (float64): rounding of a handful of float32 operations.
FORMULA_FP32 = 2e-6
# The same in float64: sums of at most a few dozen terms of size one.
FORMULA_FP64 = 1e-12

# Rewards' time-out in tests, in seconds: a hundred times what a worker needs for a cheap call on a loaded machine.
REWARD_TIMEOUT_SECONDS = 1.0
# A batch of 256 cheap rewards, in seconds: 3,000 calls a second; 20 ms measured on two idle cores (best of twenty).
REWARD_BATCH_SECONDS = 0.1
# "At once", in seconds, on a loaded machine with two cores: a process start and a kill take a tenth of it.
SOON_SECONDS = 5.0

# One process against the same documents one at a time: the same products, summed over documents in another order.
REORDER_FP64 = 1e-10
REORDER_FP32 = 1e-5
# Weights after three clipped AdamW steps in float64: Adam divides by the root of a sum, which magnifies 1e-12.
STEPS_FP64 = 1e-9
# 8-bit products against the same rounding in plain steps: a float32 scale and sum against those in float64.
FP8_PLAIN = 1e-6
# bfloat16 compute, eager against compiled, |a - b| / |b| of the whole gradient as one vector: operations fuse and round
# differently (8 bits of mantissa, 4e-3 an operation, over ten layers). Where the operations are the same, equality is.
BF16_COMPUTE = 5e-2

# First-step importance ratio minus 1, tiny float32 model at temperature 1: the generator's cached attention and the
# trainer's packed one order their sums differently; measured 1.5e-6 at most over 4,000 tokens.
FIRST_RATIO_FP32 = 1e-5
# |ratio - 1| of a token's first step in float64 with its experts replayed, where generator and trainer have router
# weights that differ by 1e-9.
FIRST_RATIO_FP64 = 1e-6
# Loss and gradients in float64 when the same trajectories are padded, packed, ordered or split otherwise.
INVARIANCE_FP64 = 1e-10

# Decoding page by page against attending to the whole document, float64: the same sums, joined in another order.
PAGED_FP64 = 1e-11
# The generator's logprobs against the trainer's packed forward, tiny float32 models, absolute, temperatures 0.7 and 1.
GENERATED_LOGPROB_FP32 = 1e-5
# The same in float64.
GENERATED_LOGPROB_FP64 = 1e-11
# The same in bfloat16, the mean: 8 bits of mantissa in the hidden states, logits of size one.
GENERATED_LOGPROB_BF16 = 1e-2
# How often a chi-square test of sampled tokens fails a correct sampler; seeds are fixed, so it does not come and go.
CHI_SQUARE_P = 1e-4

# The chunked head in float32 against whole logits, absolute log-probabilities and relative gradients: a few ulps of
# logits of size 10.
HEAD_FP32 = 5e-6
# Its gradients in bfloat16 against float64 of the same weights: 8 bits on the logits and 8 on the result.
HEAD_BF16 = 2e-2
# Gradients by its kernel in bfloat16 against float64 of the same bfloat16 logits: one rounding to 8 bits, and Triton's
# interpreter rounds toward zero.
HEAD_KERNEL_BF16 = 8e-3
# Attention kernels in bfloat16 against the definition in float32 of the same inputs: results of size one, 8 bits each.
FLASH_BF16 = 1e-2

# Resident memory of a process that holds an array of known size: next to the array the allocator keeps a page here and
# there, and returns others.
HELD_MEMORY = 5e-2

# Metrics and weights of a few steps in a layout against one process, float32, where Adam turns a rounding of a small
# gradient into a part of its learning rate of 1e-3; one document more or less moves the loss by 1e-2.
SAME_RUN = 2e-4

# Float32 on a GPU against float64 on a CPU, per tensor, as PARITY_FP32; its kernels sum in more parts.
GPU_FP32 = 5e-5
# Losses and norms of three steps of Adam in float32, a GPU against a CPU.
GPU_STEPS = 1e-3
# How many times the rounding of bfloat16 on a CPU that on a GPU may be, whole gradients as one vector.
TIMES_BF16 = 1.5
# 8-bit products of a GPU against the emulation of the same rounding: results round to bfloat16, 4e-3, and Hopper adds
# products up in about 14 bits.
FP8_GPU = 1e-2
