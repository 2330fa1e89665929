"""Arguments of Megatron-LM: what each of them is in a scenario, and which of them change neither time nor memory.

Names and defaults are those of NVIDIA/Megatron-LM, megatron/training/arguments.py at d98e8a6 (2026-08-22), and of
megatron/arguments.py at the tags v2.0 (2020) to 23.06.
"""

from __future__ import annotations

from simplan.interop.configuration import Match

MODEL = (
    Match("--num-layers", "model.num_hidden_layers"),
    Match("--hidden-size", "model.hidden_size"),
    Match("--num-attention-heads", "model.num_attention_heads"),
    Match("--seq-length", "model.seq_len"),
    Match("--max-position-embeddings", "model.max_position_embeddings"),
)
"""Sizes of every model."""
T5 = (
    Match("--decoder-num-layers", "model.num_decoder_layers"),
    Match("--decoder-seq-length", "model.decoder_seq_len"),
)
EXPERTS = (
    Match("--num-experts", "model.num_experts"),
    Match("--moe-router-topk", "model.top_k", 2),
    Match("--moe-shared-expert-intermediate-size", "model.shared_expert_intermediate_size"),
    Match("--moe-shared-expert-gate", "model.shared_expert_gate"),
)
LATENT_ATTENTION = (
    Match("--q-lora-rank", "model.q_lora_rank"),
    Match("--kv-lora-rank", "model.kv_lora_rank", 32),
    Match("--qk-head-dim", "model.qk_nope_head_dim", 128),
    Match("--qk-pos-emb-head-dim", "model.qk_rope_head_dim", 64),
    Match("--v-head-dim", "model.v_head_dim", 128),
)
PLAN = (
    Match("--tensor-model-parallel-size", "plan.tp"),
    Match("--pipeline-model-parallel-size", "plan.pp"),
    Match("--context-parallel-size", "plan.cp"),
    Match("--expert-model-parallel-size", "plan.ep"),
    Match("--micro-batch-size", "plan.microbatch_size"),
)
CONTEXT_PARALLEL = Match(
    "--cp-comm-type",
    "plan.cp_comm",
    values={"p2p": "ring", "all_gather": "all_gather", "allgather": "all_gather", "a2a": "a2a"},
)
CORE, OF_2022, OF_2021, DEEPSPEED = "megatron-core", "megatron-lm-2022", "megatron-lm-2021", "megatron-deepspeed"
DEFAULT = "the default of Megatron-LM"

TRAINING = (
    Match("--global-batch-size", "training.global_batch_size"),
    Match("--optimizer", "training.optimizer", "adam", values={"adam": "adamw", "sgd": "sgd_momentum"}),
)
"""Megatron's adam decouples weight decay, as apex's FusedAdam does by default."""

OLDER_NAMES = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--encoder-num-layers": "--num-layers",
    "--encoder-seq-length": "--seq-length",
}
"""Names of earlier versions, or of parts of a model with one."""

FLAGS = frozenset({
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
    "--accumulate-allreduce-grads-in-fp32", "--add-qkv-bias", "--apply-layernorm-1p", "--bf16",
    "--calculate-per-token-loss", "--checkpoint-activations", "--cross-entropy-loss-fusion", "--deepspeed",
    "--disable-bias-linear", "--distribute-saved-activations", "--enable-cuda-graph", "--external-cuda-graph",
    "--fp16", "--fp8-param-gather", "--grad-reduce-in-bf16", "--group-query-attention", "--log-throughput",
    "--mock-data", "--moe-enable-deepep", "--moe-grouped-gemm", "--moe-pad-expert-input-to-capacity",
    "--moe-permute-fusion", "--moe-shared-expert-gate", "--moe-shared-expert-overlap", "--multi-latent-attention",
    "--no-create-attention-mask-in-dataloader", "--no-load-optim", "--no-load-rng", "--no-masked-softmax-fusion",
    "--no-mmap-bin-files", "--no-position-embedding", "--no-rope-fusion", "--overlap-grad-reduce",
    "--overlap-moe-expert-parallel-comm", "--overlap-param-gather", "--qk-layernorm", "--recompute-activations",
    "--reset-attention-mask", "--reset-position-ids", "--sequence-parallel", "--sft", "--swiglu", "--tp-comm-overlap",
    "--untie-embeddings-and-output-weights", "--use-distributed-optimizer", "--use-flash-attn", "--use-mcore-models",
    "--use-precision-aware-optimizer", "--use-rotary-position-embeddings", "--use-torch-fsdp2",
    "--use-tp-pp-dp-mapping",
})  # fmt: skip
"""Arguments without a value, after which an unknown word is no value."""

NO_EFFECT = frozenset({
    "--abort-on-unmet-fused-kernel-constraints", "--codecarbon-dir", "--deepspeed_config", "--kill-switch-path",
    "--sync-tp-duplicated-parameters", "--train-tokens", "--train-weighted-split-paths-path",
    "--valid-num-workers", "--valid-weighted-split-paths-path", "--use-legacy-models", "--DDP-impl",
    "--sample-rate", "--tiktoken-pattern",
    "--accumulate", "--activation-func-clamp-value", "--adam", "--adlr", "--app-tag", "--apply-layernorm-1p",
    "--apply-query-key-layer-scaling", "--async", "--attention-backend", "--attention-softmax-in-fp32",
    "--auto-detect-ckpt-format", "--bert-no-binary-head", "--beta-fast", "--beta-slow", "--calculate-per-token-loss",
    "--check", "--ckpt", "--clone", "--config-logger-dir", "--create-all-gather-group",
    "--cross-entropy", "--data-args-path", "--data-cache-path", "--data-impl", "--data-path",
    "--dataloader", "--ddp-average-in-collective", "--decoupled", "--deepspeed", "--disable-gloo-process-groups",
    "--dist", "--distributed", "--enable-experimental", "--enable-ft", "--enable-one-logger", "--end-weight-decay",
    "--eod-mask-loss", "--error-injection", "--eval", "--exit", "--finetune", "--fp8-amax", "--fp8-interval",
    "--fp8-margin", "--ft", "--full-validation", "--glu-linear-offset", "--head-lr-mult",
    "--high-priority-stream-groups", "--hysteresis", "--init", "--initial-loss-scale", "--inprocess",
    "--iterations-to-skip", "--layernorm-epsilon", "--lazy-mpu-init", "--load", "--local-rank",
    "--local_rank", "--log", "--logging", "--loss-scale", "--lr", "--manual-gc", "--mask-prob",
    "--memory-snapshot-path", "--merge-file", "--min-loss-scale", "--min-lr", "--mmap", "--mock-data",
    "--moe-aux-loss-coeff", "--moe-deepep-num-sms", "--moe-grouped-gemm", "--moe-input-jitter-eps",
    "--moe-per-layer-logging", "--moe-router", "--moe-z-loss-coeff", "--mscale", "--mtp-loss-scaling-factor",
    "--multiple-validation-sets", "--no-barrier-with-level-1-timing", "--no-check", "--no-ckpt",
    "--no-create-attention-mask-in-dataloader", "--no-data-sharding", "--no-fp8-wgrad",
    "--no-gradient-reduce-div-fusion", "--no-initialization", "--no-load", "--no-log", "--no-mmap", "--no-one-logger",
    "--no-pipeline-parallel", "--no-position-embedding", "--no-query-key-layer-scaling", "--no-save", "--no-strict",
    "--no-use-tokenizer-model-from-checkpoint-args", "--node-rank", "--non-persistent", "--norm-epsilon",
    "--normalization", "--num-dataset-builder-threads", "--num-workers", "--object-storage", "--one-logger",
    "--onnx-safe", "--openai-gelu", "--original-max-position-embeddings", "--otel", "--override",
    "--persistent-save-interval", "--position-embedding-type", "--pretrained-checkpoint", "--profile", "--qk-clip",
    "--quick-geglu", "--record-memory-history", "--replication", "--rerun", "--reset-position-ids",
    "--result-rejected", "--rope", "--rotary-base", "--rotary-interleaved", "--rotary-percent",
    "--rotary-scaling-factor", "--rotary-seq-len", "--s3", "--save", "--seed", "--sft", "--sgd-momentum",
    "--short-seq-prob", "--skip-train", "--split", "--start-weight-decay", "--straggler",
    "--suggested-communication-unit-size", "--synchronize", "--te-rng-tracker", "--tensorboard", "--test-data-path",
    "--tiktoken", "--timing", "--tokenizer", "--tp-comm-bootstrap-backend", "--train-data-path",
    "--train-sync-interval", "--transformer-impl", "--trust-remote-code", "--use-checkpoint",
    "--use-cpu-initialization", "--use-dist-ckpt", "--use-flash-attn", "--use-gloo-process-groups",
    "--use-mcore-models", "--use-mp-args-from-checkpoint-args", "--use-persistent-ckpt-worker",
    "--use-pytorch-profiler", "--use-rope-scaling", "--use-rotary-position-embeddings", "--valid-data-path",
    "--vocab-file", "--wandb", "--warmup", "--weight-decay", "--wgrad-deferral-limit", "--yarn",
})  # fmt: skip
"""Names without effect, each with all longer names that begin with it and a hyphen. Arguments that the reader looks at
before are among them."""

NOT_MODELED = {
    "--embed-layernorm": "the norm after the embedding is left out",
    "--cuda-graph-impl": "CUDA graphs save launches on the host, and hold memory",
    "--cuda-graph-modules": "CUDA graphs save launches on the host, and hold memory",
    "--cuda-graph-scope": "CUDA graphs save launches on the host, and hold memory",
    "--cuda-graph-warmup-steps": "CUDA graphs save launches on the host, and hold memory",
    "--ddp-num-buckets": "buckets are of the default size",
    "--ddp-pad-buckets-for-high-nccl-busbw": "buckets are not padded",
    "--defer-embedding-wgrad-compute": "the weight gradient of the head is computed in its backward",
    "--delay-wgrad-compute": "weight gradients are computed in their backward",
    "--deterministic-mode": "kernels are those of training that is not deterministic, which are faster",
    "--disable-bf16-reduced-precision-matmul": "matmuls are as fast as usual",
    "--distribute-saved-activations": "every tensor-parallel rank saves the inputs of its blocks",
    "--empty-unused-memory-level": "the time to empty the allocator's cache is left out",
    "--enable-cuda-graph": "CUDA graphs save launches on the host, and hold memory",
    "--external-cuda-graph": "CUDA graphs save launches on the host, and hold memory",
    "--exp-avg-dtype": "Adam's moments are in FP32, which takes more memory",
    "--exp-avg-sq-dtype": "Adam's moments are in FP32, which takes more memory",
    "--fine-grained-activation-offloading": "activations stay on the device, which takes more memory",
    "--first-last-layers-bf16": "all blocks are in FP8",
    "--fp16-lm-cross-entropy": "the loss is computed in FP32",
    "--fp32-residual-connection": "the residual stream has 16 bits, which takes less memory",
    "--fp4-param-gather": "weights are stored and all-gathered in BF16",
    "--fp8-param-gather": "weights are stored and all-gathered in BF16",
    "--fused-single-qkv-rope": "rotations of queries and keys are separate kernels",
    "--keep-fp8-transpose-cache": "the memory of transposed FP8 weights is counted as usual",
    "--main-grads-dtype": "gradients are as wide as usual",
    "--main-params-dtype": "master weights are in FP32",
    "--microbatch-group-size-per-virtual-pipeline-stage": "the group is as large as the pipeline, the default",
    "--mla-down-proj-fusion": "down projections are separate matmuls",
    "--moe-apply-probs-on-input": "tokens are weighted in the activation of the experts",
    "--moe-hybridep-num-sms": "the number of SMs is the default",
    "--moe-pad-expert-input-to-capacity": "experts compute their capacity slots in any case",
    "--moe-router-padding-for-fp8": "tokens of an expert are not padded to whole FP8 blocks",
    "--moe-router-padding-for-quantization": "tokens of an expert are not padded to whole FP8 blocks",
    "--moe-shared-expert-overlap": "shared experts are computed after the dispatch, which takes longer",
    "--moe-use-legacy-grouped-gemm": "grouped GEMMs are Transformer Engine's",
    "--nccl-communicator-config-path": "NCCL has its default configuration",
    "--nccl-ub": "NCCL copies into its own buffers",
    "--no-bias-dropout-fusion": "bias, dropout and sum are one kernel, which takes less time",
    "--no-bias-gelu-fusion": "bias and GELU are one kernel, which takes less time",
    "--no-bias-swiglu-fusion": "SwiGLU is one kernel, which takes less time",
    "--no-gradient-accumulation-fusion": "matmuls add to the gradients, which takes less time and memory",
    "--no-masked-softmax-fusion": "attention is the kernel of the profile",
    "--no-overlap-p2p-communication": "interleaved schedules overlap P2P sends",
    "--no-persist-layer-norm": "the norm is one kernel",
    "--no-rope-fusion": "the rotation is one kernel",
    "--no-scatter-gather-tensors-in-pipeline": "each tensor-parallel rank sends as its profile does",
    "--overlap-p2p-communication-warmup-flush": "P2P sends are not overlapped in the warm-up",
    "--overlap-param-gather-with-optimizer-step": "the optimizer runs before the all-gather of parameters",
    "--rampup-batch-size": "the step is one with the full batch",
    "--reset-attention-mask": "every sequence is one document, whose attention costs more than that of several",
    "--reuse-grad-buf-for-mxfp8-param-ag": "weights are stored and all-gathered in BF16",
    "--step-batch-size-schedule": "the step is one with the full batch",
    "--tp-comm-overlap-rs-dgrad": "tensor-parallel collectives overlap as with --tp-comm-overlap alone",
    "--use-nccl-ub": "NCCL copies into its own buffers",
    "--use-precision-aware-optimizer": "Adam's states are in FP32",
    "--use-ring-exchange-p2p": "P2P sends are NCCL's",
    "--use-sharp": "collectives are NCCL's, without SHARP",
    "--use-transformer-engine-op-fuser": "kernels are Transformer Engine's without its fuser",
}  # fmt: skip
"""Argument -> what is predicted instead, and its effect."""

REFUSED = {
    "--cpu-offloading-num-layers": ("copies activations to the host, which is not modeled yet", "remove it"),
    "--decoder-tensor-model-parallel-size": ("is not modeled yet", "use one degree for encoder and decoder"),
    "--enable-zero-bubble": ("is of a fork, and its schedule is one of several", "remove it, and add --schedule zb-h1"),
    "--encoder-tensor-model-parallel-size": ("is not modeled yet", "use one degree for encoder and decoder"),
    "--encoder-pipeline-model-parallel-size": ("is not modeled yet", "use one pipeline for encoder and decoder"),
    "--experimental-attention-variant": ("is an attention that is not modeled yet", ""),
    "--heterogeneous-layers-config-path": ("gives each block its own sizes, which is not modeled yet", ""),
    "--hierarchical-context-parallel-sizes": ("is not modeled yet", "use --cp-comm-type p2p or a2a"),
    "--hybrid-attention-ratio": ("is for Mamba's blocks, which are not modeled yet", ""),
    "--hybrid-layer-pattern": ("is for Mamba's blocks, which are not modeled yet", ""),
    "--hybrid-override-pattern": ("is for Mamba's blocks, which are not modeled yet", ""),
    "--is-hybrid-model": ("is for Mamba's blocks, which are not modeled yet", ""),
    "--linear-attention-freq": ("is for linear attention, which is not modeled yet", ""),
    "--num-layers-per-stage": ("is not modeled yet", ""),
    "--optimizer-cpu-offload": ("keeps optimizer states in host memory, which is not modeled yet", "remove it"),
    "--pipeline-model-parallel-split-rank": ("gives encoder and decoder ranks of their own, which is not modeled", ""),
    "--retro-add-retriever": ("is for Retro, which is not modeled yet", ""),
    "--standalone-embedding-stage": ("is not modeled yet", "give --pipeline-model-parallel-layout"),
    "--use-torch-fsdp2": ("is FSDP2, which simplan models with the software torch only", "remove it"),
    "--yaml-cfg": ("has the arguments in another file", "name that file"),
}  # fmt: skip
"""Arguments without which the answer would be about another job -> rule and fix."""

VOCABULARIES = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522,
    "BertWordPieceCase": 28996,
    "Llama2Tokenizer": 32000,
}
"""Entries of the vocabulary of a ``--tokenizer-type`` that has one vocabulary only."""

DEFAULT_TOKENIZERS = {
    "pretrain_gpt.py": "GPT2BPETokenizer",
    "pretrain_bert.py": "BertWordPieceLowerCase",
    "pretrain_t5.py": "BertWordPieceLowerCase",
}
"""``args_defaults`` of the programs."""

REFUSED_PROGRAMS = {
    "retro": "Retro models",
    "mamba": "Mamba models",
    "hybrid": "Mamba models",
    "vision": "vision models of Megatron-LM",
    "vlm": "models of images and text",
    "multimodal": "models of images and text",
    "mimo": "models of images and text",
    "ict": "biencoders",
    "biencoder": "biencoders",
    "train_rl": "reinforcement learning",
    "inference": "inference",
    "generat": "inference",
    "server": "inference",
}
"""Part of the name of a program -> what it trains, which is not modeled."""
