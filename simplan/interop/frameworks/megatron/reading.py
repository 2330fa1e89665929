"""Arguments of Megatron-LM as a scenario."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from typing import Any

from simplan import catalog
from simplan.interop.configuration import Configuration, Reading, Setting
from simplan.interop.formats import ConfigFile
from simplan.interop.frameworks import megatron_core as core
from simplan.interop.frameworks.megatron.arguments import Arguments, alike, hyphenated, read_arguments
from simplan.interop.frameworks.megatron.options import (
    CONTEXT_PARALLEL,
    DEFAULT_TOKENIZERS,
    EXPERTS,
    FLAGS,
    LATENT_ATTENTION,
    MODEL,
    NO_EFFECT,
    NOT_MODELED,
    PLAN,
    REFUSED,
    REFUSED_PROGRAMS,
    T5,
    TRAINING,
    VOCABULARIES,
)
from simplan.interop.frameworks.shell import OTHER_FILE

TITLE = "Megatron-LM arguments"
CORE, OF_2022, OF_2021, DEEPSPEED = "megatron-core", "megatron-lm-2022", "megatron-lm-2021", "megatron-deepspeed"
_SIGNS_OF_CORE = ("--use-mcore-models", "--use-flash-attn", "--attention-backend", "--moe-router-topk", "--fp8-format")
_SIGNS_OF_2021 = (
    "--checkpoint-activations", "--activations-checkpoint-method",
    "--activations-checkpoint-num-layers", "--distribute-checkpointed-activations",
    "--checkpoint-num-layers", "--use-contiguous-buffers-in-ddp",
)  # fmt: skip
_SIGNS_OF_2022 = (
    "--data-impl",
    "--DDP-impl",
    "--layernorm-epsilon",
    "--no-query-key-layer-scaling",
    "--use-legacy-models",
)
_DEFAULT = "the default of Megatron-LM"
_OPTIONS = {
    "plan.tp": "--tp 8", "plan.pp": "--pp 4", "plan.cp": "--cp 2", "plan.ep": "--ep 8",
    "plan.microbatch_size": "--microbatch-size 1", "plan.recompute": "--recompute full",
    "plan.virtual_stages": "--virtual-stages 2", "model.seq_len": "--seq-len 4096",
    "training.precision": "--precision bf16", "training.global_batch_size": "--global-batch-size 512",
    "plan.zero_stage": "--set plan.zero_stage=1", "plan.sequence_parallel": "--set plan.sequence_parallel=true",
    "software.expert_dispatch": "--set software.expert_dispatch=all_to_all",
    "training.optimizer": "--set training.optimizer=adamw",
}  # fmt: skip
"""Key of a scenario -> option with a usual value."""
_ASKED = {
    **{match.key: match.path for match in (*MODEL, *T5, *EXPERTS, *LATENT_ATTENTION)},
    **{match.key: match.path for match in (*PLAN, *TRAINING, CONTEXT_PARALLEL)},
    "--ffn-hidden-size": "model.intermediate_size",
    "--num-query-groups": "model.num_key_value_heads",
    "--kv-channels": "model.head_dim",
    "--vocab-size": "model.vocab_size",
    "--padded-vocab-size": "model.vocab_size",
    "--moe-ffn-hidden-size": "model.moe_intermediate_size",
    "--recompute-granularity": "plan.recompute",
    "--recompute-activations": "plan.recompute",
    "--recompute-num-layers": "plan.recompute_layers",
    "--num-layers-per-virtual-pipeline-stage": "plan.virtual_stages",
    "--num-virtual-stages-per-pipeline-rank": "plan.virtual_stages",
    "--expert-tensor-parallel-size": "plan.etp",
    "--sequence-parallel": "plan.sequence_parallel",
    "--use-distributed-optimizer": "plan.zero_stage",
    "--zero-stage": "plan.zero_stage",
    "--bf16": "training.precision",
    "--fp16": "training.precision",
    "--fp8-format": "training.precision",
    "--swiglu": "model.family",
    "--moe-token-dispatcher-type": "software.expert_dispatch",
}  # fmt: skip
"""Argument whose value decides the plan -> key of the scenario that is asked for if the value is not known."""
_RECOMPUTED = {
    "core_attn": "core_attn",
    "mla_up_proj": "mla_up_proj",
    "layernorm": "layernorm",
    "moe_act": "moe_act",
    "mlp": "mlp",
    "moe": "moe",
    "shared_experts": "shared_experts",
}
_FP8_RECIPES = {"delayed": "delayed", "tensorwise": "tensorwise", "blockwise": "blockwise"}
_MAX_LAYERS, _MAX_PATTERN = 10_000, 1_000
_UNEVEN = (
    "--decoder-first-pipeline-num-layers", "--decoder-last-pipeline-num-layers",
    "--account-for-embedding-in-pipeline-split", "--account-for-loss-in-pipeline-split",
)  # fmt: skip
"""Arguments that give the first and last stage other numbers of blocks."""
_NUM_DEVICES = "devices"
"""Name of the product of nodes and ranks per node of the launcher, in origins."""
_VOCABULARY_KEYS = ("--padded-vocab-size", "--pad-vocab-size-to", "--vocab-size")


def read(file: ConfigFile) -> Configuration:
    """Scenario of a launch script.

    Raises:
        SpecError: See ``read_arguments``, and ``Reading.finish``.
    """
    arguments = read_arguments(file)
    words = " x ".join(f"{setting.key} {setting.value}" for setting in arguments.launcher)
    line = arguments.launcher[0].line if arguments.launcher else None
    devices = Setting(_NUM_DEVICES, words, line if line is not None and line < OTHER_FILE else None)
    reading = Reading.of(TITLE, file.name, (*arguments.settings, devices, *arguments.extra))
    if arguments.num_devices is None:
        reading.value(_NUM_DEVICES)
    return MegatronReader(reading, arguments).configuration()


class MegatronReader:
    """Reader of one set of arguments.

    Attributes:
        reading: Arguments on their way into a scenario.
        arguments: The arguments, with those that are not certain.
        software: Profile that models this version.
    """

    def __init__(self, reading: Reading, arguments: Arguments) -> None:
        self.reading = reading
        self.arguments = arguments
        self.software = CORE

    def configuration(self) -> Configuration:
        """Read everything."""
        self._check_program()
        self._read_unsure()
        self._read_software()
        self._read_model()
        self._read_parallelism()
        self._read_stages()
        self._read_recompute()
        self._read_sharding()
        self._read_training()
        self._read_devices()
        self._sort_rest()
        return replace(self.reading.finish(), search={"schedule": ["1f1b", "interleaved_1f1b"]})

    def _check_program(self) -> None:
        program = self.arguments.program
        for part, what in REFUSED_PROGRAMS.items():
            if part in program.lower():
                self.reading.refuse(
                    program, f"trains {what}, which are not modeled yet", "give a script of pretrain_gpt.py"
                )
                return
        for key, (rule, fix) in REFUSED.items():
            value = self.reading.settings[key].value if key in self.reading else None
            if value not in (None, 0, "none", "None"):
                self.reading.refuse(key, rule, fix)
        known = FLAGS | NOT_MODELED.keys() | REFUSED.keys() | _ASKED.keys()
        for setting, other in hyphenated(self.arguments.settings):
            is_own = alike(NO_EFFECT, setting.key) or setting.key.startswith("--deepspeed")
            if not is_own and (other.key in known or alike(NO_EFFECT, other.key)):
                self.reading.contradiction(setting.key, "is no argument of Megatron-LM", f"write {other.key}")

    def _read_unsure(self) -> None:
        """Ask for values that decide the plan and that the file does not tell."""
        asked: set[str] = set()
        for setting, why in self.arguments.unsure:
            path = _ASKED.get(setting.key)
            is_rotary = setting.key == "--max-position-embeddings" and self.value("--position-embedding-type") == "rope"
            if path is None or path in asked or is_rotary:
                continue
            shown = setting.key if setting.value is True else f"{setting.key} {setting.value}"
            place = f" in line {setting.line}" if setting.line is not None else ""
            fix = f"add {_option(path)}"
            if why.endswith("argument of the script") and not asked:
                fix += f", or name a file with the line: bash {self.reading.file.rpartition('/')[2]} ARGUMENTS"
            asked.add(path)
            keys = ("model.preset", "model.hf_config") if path.startswith("model.") and path != "model.seq_len" else ()
            self.reading.ask(path, *keys, what=f"has {shown}{place}, which {why}", fix=fix)

    def _is_unsure(self, *keys: str) -> bool:
        return any(setting.key in keys for setting, _ in self.arguments.unsure)

    def _read_software(self) -> None:
        sign = next((key for key in _SIGNS_OF_CORE if key in self.reading), "")
        older = next((key for key in _SIGNS_OF_2021 if key in self.reading), "")
        of_2022 = next((key for key in _SIGNS_OF_2022 if key in self.reading), "")
        if any(key.startswith("--deepspeed") or key == "--zero-stage" for key in self.reading.settings):
            self.software = DEEPSPEED
            sign = next(key for key in self.reading.settings if key.startswith("--deepspeed") or key == "--zero-stage")
        elif not sign and (older or of_2022):
            self.software, sign = (OF_2021, older) if older else (OF_2022, of_2022)
        if self.reading.value("--transformer-impl") == "local" and self.software == CORE:
            self.reading.not_modeled("--transformer-impl", "kernels are Transformer Engine's")
        self.reading.put(
            "software.preset", self.software, sign or "as of recent scripts; --software names another profile"
        )
        multiple = self.reading.value("--make-vocab-size-divisible-by")
        if multiple is not None:
            self.reading.put("software.vocab_multiple", multiple, "--make-vocab-size-divisible-by")
        if self.software == CORE:
            self._read_overlap()
        backend = self.reading.value("--attention-backend", "auto")
        if backend in ("unfused", "local"):
            self.reading.not_modeled("--attention-backend", "attention is fused, which takes less time and memory")

    def _read_overlap(self) -> None:
        """Collectives that overlap compute, which are options of Megatron Core's profile."""
        for key, option, value in (
            ("--overlap-grad-reduce", "grad_overlap", True),
            ("--overlap-param-gather", "overlap_param_gather", True),
            ("--tp-comm-overlap", "tp_overlap", "all"),
            ("--no-async-tensor-model-parallel-allreduce", "tp_overlap", "none"),
        ):
            if key in self.reading:
                self.reading.put(f"software.{option}", value, key)

    def _read_model(self) -> None:
        reading = self.reading
        if not {"--num-layers", "--hidden-size"} & reading.settings.keys() and not self._is_unsure("--num-layers"):
            reading.ask(
                "model.preset", "model.hf_config", what="does not say the sizes of the model", fix="add --model NAME"
            )
            reading.match([match for match in MODEL if match.path == "model.seq_len"])
        else:
            reading.match(MODEL)
            self._read_family()
            self._read_vocabulary()
        if "--seq-length" not in reading and not self._is_unsure("--seq-length"):
            reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")

    def _read_family(self) -> None:
        reading, program = self.reading, self._program.lower()
        gated = "--swiglu" in reading or ("--quick-geglu" in reading and "--glu-linear-offset" in reading)
        if "t5" in program:
            family = "t5"
        elif "bert" in program:
            family = "bert"
        elif "--multi-latent-attention" in reading:
            family = "deepseek"
        elif _is_above(self.value("--num-experts"), 1):
            family = "moe"
        else:
            family = "llama" if gated else "gpt"
        sign = {"deepseek": "--multi-latent-attention", "moe": "--num-experts", "llama": "--swiglu"}.get(family, "")
        reading.put("model.family", family, sign if sign in reading else self.arguments.program or _DEFAULT)
        if family in ("moe", "deepseek") and not gated:
            reading.refuse("--num-experts", "has experts without --swiglu, which are not modeled yet", "add --swiglu")
        if family == "deepseek" and not _is_above(self.value("--num-experts"), 1):
            reading.refuse("--multi-latent-attention", "without --num-experts is not modeled yet")
        reading.value("--swiglu")
        self._read_sizes(family, gated=gated)
        self._note_differences(family, gated=gated)

    def value(self, key: str, default: Any = None) -> Any:
        """Value of an argument."""
        return self.reading.settings[key].value if key in self.reading else default

    def _read_sizes(self, family: str, *, gated: bool) -> None:
        reading = self.reading
        hidden, heads = self.value("--hidden-size"), self.value("--num-attention-heads")
        if family in ("moe", "deepseek") and "--moe-layer-freq" not in reading:
            reading.no_effect(
                "--ffn-hidden-size" if "--moe-ffn-hidden-size" in reading else ""
            )  # of blocks without experts
        elif "--ffn-hidden-size" in reading:
            reading.put("model.intermediate_size", reading.value("--ffn-hidden-size"), "--ffn-hidden-size")
        elif isinstance(hidden, int) and not self._is_unsure("--ffn-hidden-size"):
            size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
            reading.put("model.intermediate_size", size, f"{_DEFAULT}, by --hidden-size")
        if "--kv-channels" in reading and family != "deepseek":
            reading.put("model.head_dim", reading.value("--kv-channels"), "--kv-channels")
        reading.no_effect("--kv-channels")
        if family in ("llama", "moe", "gpt") and "--num-key-value-heads" in reading:
            reading.put("model.num_key_value_heads", reading.value("--num-key-value-heads"), "--num-key-value-heads")
        elif family in ("llama", "moe", "gpt") and "--group-query-attention" in reading:
            groups = reading.value("--num-query-groups", 1)
            reading.put(
                "model.num_key_value_heads",
                groups,
                "--num-query-groups" if "--num-query-groups" in reading else _DEFAULT,
            )
        elif family in ("llama", "moe", "gpt") and isinstance(heads, int):
            reading.put("model.num_key_value_heads", heads, "without --group-query-attention, one for each head")
        reading.no_effect("--group-query-attention", "--num-query-groups")
        untied = "--untie-embeddings-and-output-weights" in reading
        key = "--untie-embeddings-and-output-weights"
        if family not in ("t5", "bert") or untied:
            reading.put("model.tied_embeddings", not untied, key if untied else _DEFAULT)
        if family == "t5":
            reading.match(T5)
            reading.value("--max-position-embeddings")
            reading._data.get("model", {}).pop("max_position_embeddings", None)
        if family in ("moe", "deepseek"):
            self._read_experts()
        if family == "deepseek":
            reading.match(LATENT_ATTENTION)
            reading.value("--multi-latent-attention")
        self._read_attention(family)

    def _read_experts(self) -> None:
        reading = self.reading
        reading.match(EXPERTS)
        own, dense = self.value("--moe-ffn-hidden-size"), self.value("--ffn-hidden-size")
        if own is not None or dense is not None:
            key = "--moe-ffn-hidden-size" if own is not None else "--ffn-hidden-size"
            reading.put("model.moe_intermediate_size", reading.value(key), key)
        else:
            reading.ask(
                "model.moe_intermediate_size",
                what="does not say how wide experts are",
                fix="add --set model.moe_intermediate_size=1408",
            )
        self._read_dense_layers()
        factor = reading.value("--moe-expert-capacity-factor")
        if factor is not None:
            number = float(factor) if isinstance(factor, int | float) else factor
            reading.put("model.capacity_factor", number, "--moe-expert-capacity-factor")
            reading.put("model.drop_tokens", True, "--moe-expert-capacity-factor")
        if self.software == CORE and not self._is_unsure("--moe-token-dispatcher-type"):
            self._read_dispatch()
        reading.no_effect("--moe-permute-fusion")
        if "--moe-grouped-gemm" not in reading:
            reading.not_modeled(
                "--num-experts", "without --moe-grouped-gemm, experts run one after another, which takes longer"
            )

    def _read_dense_layers(self) -> None:
        """``--moe-layer-freq``: every how many blocks have experts, or a Python list of 0 and 1 by block."""
        reading, layers = self.reading, self.value("--num-layers")
        key = "--moe-layer-freq"
        if key not in reading:
            return
        pattern = _pattern(reading.value(key))
        if pattern == 1:
            reading.no_effect(key)
            return
        if not isinstance(pattern, list) or not isinstance(layers, int) or len(pattern) != layers:
            rule = (
                "is an order of blocks that is not modeled yet" if isinstance(pattern, list | int) else "cannot be read"
            )
            reading.refuse(key, rule, "write blocks without experts first: ([0]*3+[1]*58)")
            return
        dense = pattern.index(1) if 1 in pattern else len(pattern)
        if 0 in pattern[dense:] or 1 not in pattern:
            reading.refuse(key, "has blocks without experts after those with experts, which is not modeled yet")
            return
        reading.put("model.num_dense_layers", dense, key)

    def _read_dispatch(self) -> None:
        reading = self.reading
        kind = reading.value("--moe-token-dispatcher-type", "allgather")
        backend = reading.value("--moe-flex-dispatcher-backend", "deepep")
        fused = "--moe-permute-fusion" in reading
        reading.value("--moe-permute-fusion"), reading.value("--moe-enable-deepep")
        if kind == "flex":
            dispatch, key = str(backend), "--moe-token-dispatcher-type"
        else:
            dispatch, key = "all_to_all" if fused else "copies", "--moe-permute-fusion"
        reading.put("software.expert_dispatch", dispatch, key if key in reading else f"{_DEFAULT}, without {key}")
        if kind == "allgather":
            if "--moe-token-dispatcher-type" in reading:
                reading.not_modeled("--moe-token-dispatcher-type", "tokens are dispatched by all-to-all")
            elif _is_above(self.value("--expert-model-parallel-size"), 1):
                reading.not_modeled(
                    "--expert-model-parallel-size", "the default dispatcher is allgather; here it is all-to-all"
                )
        if "--overlap-moe-expert-parallel-comm" in reading:
            reading.put("software.expert_overlap", True, "--overlap-moe-expert-parallel-comm")

    def _read_attention(self, family: str) -> None:
        reading = self.reading
        biased = "--disable-bias-linear" not in reading
        reading.no_effect("--disable-bias-linear")
        if family in ("llama", "moe"):
            if biased:
                reading.put("model.attention_bias", True, f"{_DEFAULT}, without --disable-bias-linear")
            elif "--add-qkv-bias" in reading:
                reading.put("model.qkv_bias", True, "--add-qkv-bias")
            if "--qk-layernorm" in reading:
                reading.put("model.qk_norm", "head", "--qk-layernorm")
            self._read_window()
            if family == "moe" and self.value("--softmax-type") == "learnable":
                reading.put("model.attention_sinks", True, "--softmax-type")
            if family == "moe" and biased:
                reading.put("model.expert_bias", True, f"{_DEFAULT}, without --disable-bias-linear")
        elif family == "deepseek":
            reading.no_effect("--qk-layernorm")  # of the latent vectors, which simplan's latent attention has
        if family != "bert" and "--mtp-num-layers" in reading and _is_above(self.value("--mtp-num-layers"), 0):
            if family == "gpt":
                reading.refuse("--mtp-num-layers", "is not modeled with blocks of GPT", "remove it")
            else:
                reading.put("model.mtp_num_layers", reading.value("--mtp-num-layers"), "--mtp-num-layers")

    def _read_window(self) -> None:
        """``--window-size LEFT,RIGHT``, and ``--window-attn-skip-freq``: period whose last block has no window."""
        reading = self.reading
        window = reading.value("--window-size")
        if window is None:
            return
        match = re.fullmatch(
            r"\(?\s*(\d+)\s*,\s*0\s*\)?", " ".join(map(str, window)) if isinstance(window, list) else str(window)
        )
        if match is None:
            reading.refuse(
                "--window-size", "is a window that is not modeled", "write 127,0 for the token itself and 127 before it"
            )
            return
        reading.put("model.sliding_window", int(match[1]) + 1, "--window-size")
        every = reading.value("--window-attn-skip-freq")
        pattern = _pattern(every) if every is not None else None
        if isinstance(pattern, list):
            period = pattern.index(0) + 1 if 0 in pattern else 0
            if pattern != [int(not period or (block + 1) % period > 0) for block in range(len(pattern))]:
                reading.refuse(
                    "--window-attn-skip-freq", "is an order of blocks that is not modeled yet", "give a number"
                )
                return
            pattern = period
        if pattern is not None:
            reading.put("model.sliding_window_pattern", pattern, "--window-attn-skip-freq")

    def _note_differences(self, family: str, *, gated: bool) -> None:
        """Note parts of the blocks that the family has in another form."""
        reading = self.reading
        rms = str(self.value("--normalization", "LayerNorm")).lower() == "rmsnorm"
        rotary = (
            self.value("--position-embedding-type") in ("rope", "yarn", "mrope")
            or "--use-rotary-position-embeddings" in reading
        )
        sized = "--hidden-size"
        if family in ("llama", "moe", "deepseek"):
            if not rms:
                reading.not_modeled(
                    "--normalization" if "--normalization" in reading else sized,
                    "LayerNorm is predicted as RMSNorm, whose time is nearly the same",
                )
            if not rotary and "--no-position-embedding" not in reading:
                reading.not_modeled("--max-position-embeddings", "learned positions are predicted as rotary ones")
            if family == "llama" and "--disable-bias-linear" not in reading:
                reading.not_modeled("--swiglu", "biases of the MLP are left out, which are a few numbers per row")
        elif family == "gpt":
            if rotary:
                key = (
                    "--position-embedding-type"
                    if "--position-embedding-type" in reading
                    else "--use-rotary-position-embeddings"
                )
                reading.not_modeled(
                    key, "rotary positions are predicted as learned ones; the rotation takes a little longer"
                )
            elif self.value("--position-embedding-type") not in (None, "learned_absolute"):
                what = "is predicted as learned positions, whose time is nearly the same"
                reading.not_modeled("--position-embedding-type", what)
            if "--disable-bias-linear" in reading:
                reading.not_modeled(
                    "--disable-bias-linear", "biases are predicted nevertheless, which are a few numbers per row"
                )
            for key in ("--squared-relu", "--normalization"):
                if key in reading and (key != "--normalization" or rms):
                    reading.not_modeled(
                        key, "predicted as GELU" if key == "--squared-relu" else "predicted as LayerNorm"
                    )
            for key in ("--qk-layernorm", "--add-qkv-bias"):
                reading.not_modeled(
                    key, "norms of queries and keys are left out" if "norm" in key else "predicted as all biases"
                )
        self._note_dropout(family)

    def _note_dropout(self, family: str) -> None:
        has = family in ("gpt", "bert", "t5")
        for key in ("--hidden-dropout", "--attention-dropout"):
            given = self.reading.value(key, 0.1)
            if (given > 0 if isinstance(given, int | float) else True) == has:
                self.reading.no_effect(key)
                self.reading.value(key)
            elif key in self.reading:
                what = (
                    "dropout is predicted nevertheless, which takes longer and more memory"
                    if has
                    else "dropout is left out"
                )
                self.reading.not_modeled(key, what)
            elif "--hidden-size" in self.reading and key == "--hidden-dropout":
                self.reading.not_modeled(
                    "--hidden-size", "the default of Megatron-LM is dropout of 0.1, which is left out"
                )

    def _read_vocabulary(self) -> None:
        reading, path = self.reading, "model.vocab_size"
        kind = self.value("--tokenizer-type")
        sized = next((key for key in _VOCABULARY_KEYS if key in reading), None)
        if sized is not None:
            reading.put(path, reading.value(sized), sized)
            for key in _VOCABULARY_KEYS:
                reading.value(key)
        elif isinstance(kind, str) and kind in VOCABULARIES and not self._has_own_vocabulary(kind):
            extra = reading.value("--vocab-extra-ids", 0)
            reading.put(path, VOCABULARIES[kind] + (extra if isinstance(extra, int) else 0), "--tokenizer-type")
        elif kind is None and self._program in DEFAULT_TOKENIZERS and "--tokenizer-model" not in self._all_keys():
            default = DEFAULT_TOKENIZERS[self._program]
            reading.put(path, VOCABULARIES[default], f"{default}, the default of {self._program}")
        elif (preset := _preset_of(self.value("--tokenizer-model"))) is not None:
            size = catalog.model(preset).vocab_size
            reading.put(path, size, "--tokenizer-model")
        elif not self._is_unsure(*_VOCABULARY_KEYS):
            of = f" (its tokenizer is {kind})" if isinstance(kind, str) else ""
            what = f"does not say how many entries the vocabulary has{of}"
            reading.ask(path, "model.preset", what=what, fix="add --set model.vocab_size=128256")
        reading.no_effect("--vocab-extra-ids")

    def _has_own_vocabulary(self, kind: str) -> bool:
        """True if a SentencePiece file has another name than Llama 2's: then nothing says how large it is."""
        model = self.reading.settings.get("--tokenizer-model")
        return kind == "Llama2Tokenizer" and model is not None and not str(model.value).endswith("tokenizer.model")

    def _all_keys(self) -> set[str]:
        return {*self.reading.settings, *(setting.key for setting, _ in self.arguments.unsure)}

    @property
    def _program(self) -> str:
        return self.arguments.program.rpartition("/")[2]

    def _read_parallelism(self) -> None:
        reading = self.reading
        reading.match(PLAN)
        tp = None if self._is_unsure("--tensor-model-parallel-size") else self.value("--tensor-model-parallel-size", 1)
        if "--sequence-parallel" not in reading and tp != 1 and not self._is_unsure("--sequence-parallel"):
            reading.put("plan.sequence_parallel", False, "without --sequence-parallel")
        elif "--sequence-parallel" in reading and isinstance(tp, int) and tp > 1:
            reading.put("plan.sequence_parallel", True, "--sequence-parallel")
        reading.no_effect("--sequence-parallel")  # with one tensor-parallel rank
        if _is_above(self.value("--context-parallel-size"), 1):
            reading.match([CONTEXT_PARALLEL])
        reading.no_effect("--cp-comm-type")
        own = "--expert-tensor-parallel-size"
        if _is_above(self.value("--num-experts"), 1) and tp != 1:
            if own in reading:
                reading.put("plan.etp", reading.value(own), own)
            elif isinstance(tp, int):
                reading.put("plan.etp", tp, f"{_DEFAULT}, as --tensor-model-parallel-size")
            elif not self._is_unsure(own):
                what = f"has no {own}, which is then --tensor-model-parallel-size"
                reading.ask("plan.etp", what=what, fix="add --set plan.etp=1")
        reading.no_effect("--expert-tensor-parallel-size")

    def _read_stages(self) -> None:
        """Virtual stages, and blocks per stage."""
        reading, layers, pp = self.reading, self.value("--num-layers"), self.value("--pipeline-model-parallel-size", 1)
        layout = "--pipeline-model-parallel-layout"
        if layout in reading and isinstance(pp, int):
            self._read_layout(str(reading.value(layout)), pp)
            return
        per_stage, number = "--num-layers-per-virtual-pipeline-stage", "--num-virtual-stages-per-pipeline-rank"
        virtual = 1
        if number in reading:
            virtual = reading.value(number)
            reading.put("plan.virtual_stages", virtual, number)
        elif per_stage in reading and isinstance(layers, int) and isinstance(pp, int) and pp > 1:
            blocks = reading.value(per_stage)
            if not isinstance(blocks, int) or blocks < 1 or layers % (pp * blocks):
                reading.contradiction(per_stage, f"times {pp} pipeline ranks does not divide --num-layers = {layers}")
                return
            virtual = layers // pp // blocks
            if virtual > 1:
                reading.put("plan.virtual_stages", virtual, per_stage)
        reading.no_effect(per_stage)
        if self._is_unsure("--pipeline-model-parallel-size"):
            self._ask_for_stages()
        elif isinstance(layers, int) and isinstance(pp, int) and _is_above(virtual, 0) and pp > 1:
            self._read_uneven_stages(layers, pp, virtual)

    def _ask_for_stages(self) -> None:
        keys = [key for key in _UNEVEN if key in self.reading]
        for key in keys:
            self.reading.value(key)
        if keys:
            what = f"has {keys[0]}, whose stages depend on --pipeline-model-parallel-size"
            fix = "add --set plan.stage_layers='[2, 3, 3, 2]', blocks of each stage"
            self.reading.ask("plan.stage_layers", what=what, fix=fix)

    def _read_uneven_stages(self, layers: int, pp: int, virtual: int) -> None:
        """Other numbers of blocks in the first and last rank (megatron/core/transformer/transformer_block.py)."""
        reading = self.reading
        first, last, embedding, loss = _UNEVEN
        parts = "--pp-partition-method"
        keys = [key for key in (first, last, embedding, loss) if key in reading]
        with_ends = reading.value(parts) == "type:transformer|embedding"
        if not keys and not with_ends:
            if layers % (pp * virtual):
                what = (
                    f"does not divide --num-layers = {layers}, which Megatron-LM refuses; here stages differ by a block"
                )
                reading.not_modeled("--pipeline-model-parallel-size", what)
            return
        keys = keys or [parts]
        by_rank: list[int | None] = [None] * pp
        if first in reading or last in reading:
            for key, rank in ((first, 0), (last, -1)):
                if key in reading:
                    by_rank[rank] = reading.value(key)
            middle = [rank for rank, blocks in enumerate(by_rank) if blocks is None]
            rest = layers - sum(blocks for blocks in by_rank if isinstance(blocks, int))
            if (not middle and rest) or (middle and rest % len(middle)):
                reading.contradiction(keys[0], f"leaves {rest} blocks for {len(middle)} pipeline ranks", "change it")
                return
            blocks = [rest // len(middle) if each is None else each for each in by_rank]
            stages = [number // virtual for _ in range(virtual) for number in blocks]
        else:
            ends = (embedding in reading or with_ends, loss in reading or with_ends)
            stages = [(layers + sum(ends)) // (pp * virtual)] * (pp * virtual)
            stages[0] -= ends[0]
            stages[-1] -= ends[1]
        for key in keys:
            reading.value(key)
        if sum(stages) != layers:
            reading.contradiction(
                keys[0], f"does not split {layers} blocks over {pp * virtual} stages evenly", "change it"
            )
            return
        reading.put("plan.stage_layers", stages, keys[0])

    def _read_layout(self, layout: str, pp: int) -> None:
        """``--pipeline-model-parallel-layout``: E, t, m and L by stage, ``|`` between stages, ``*N`` for N times."""
        key, text = "--pipeline-model-parallel-layout", layout.replace(",", "").replace(" ", "")
        while match := re.search(r"\(([^()]*)\)\*(\d{1,4})|([A-Za-z|])\*(\d{1,4})", text):
            group, times = (match[1], match[2]) if match[2] else (match[3], match[4])
            text = text[: match.start()] + group * int(times) + text[match.end() :]
            if len(text) > _MAX_LAYERS:
                break
        stages = text.split("|")
        wrong = re.sub(r"[EtmL|]", "", text) or not stages[0].startswith("E") or not stages[-1].endswith("L")
        if wrong or len(stages) % pp:
            self.reading.refuse(
                key,
                "is a layout that is not modeled: embedding first, blocks, loss last",
                "give E, t, m and L by stage",
            )
            return
        self.reading.put("plan.stage_layers", [stage.count("t") for stage in stages], key)
        if len(stages) > pp:
            self.reading.put("plan.virtual_stages", len(stages) // pp, key)
        if any("m" in stage for stage in stages[:-1]):
            self.reading.not_modeled(key, "layers for multi-token prediction are predicted on the last stage")

    def _read_recompute(self) -> None:
        reading = self.reading
        granularity, key = reading.value("--recompute-granularity"), "--recompute-granularity"
        method = reading.value("--recompute-method", reading.value("--activations-checkpoint-method"))
        number_key = next(
            (
                each
                for each in ("--recompute-num-layers", "--activations-checkpoint-num-layers", "--checkpoint-num-layers")
                if each in reading
            ),
            "--recompute-num-layers",
        )
        number = reading.value(number_key, 1)
        if "--recompute-activations" in reading:
            granularity, key = "selective", "--recompute-activations"
        for each in ("--checkpoint-activations", "--activations-checkpoint-method"):
            if each in reading:
                granularity, key = "full", each
        if "--moe-layer-recompute" in reading and granularity != "full":
            reading.put("plan.recompute", "selective", "--moe-layer-recompute")
            reading.put("plan.recompute_modules", ["moe"], "--moe-layer-recompute")
            return
        if granularity in (None, "none"):
            reading.no_effect(
                "--recompute-method", "--recompute-num-layers", "--recompute-modules", "--checkpoint-num-layers"
            )
            return
        if granularity not in ("full", "selective"):
            reading.refuse(key, "is not modeled yet", "only full or selective is")
            return
        reading.put("plan.recompute", granularity, key)
        if granularity == "selective":
            self._read_recomputed_modules()
        elif method == "block" and isinstance(number, int):
            reading.put("plan.recompute_layers", number, number_key)
        elif _is_above(number, 1):
            reading.not_modeled(
                number_key, "the input of every block is saved, which takes more memory than one per group"
            )

    def _read_recomputed_modules(self) -> None:
        reading, key = self.reading, "--recompute-modules"
        if key not in reading:
            return
        given = reading.value(key)
        modules = [str(each) for each in (given if isinstance(given, list) else str(given).replace(",", " ").split())]
        others = [each for each in modules if each not in _RECOMPUTED]
        if others:
            reading.refuse(key, f"has {', '.join(others)}, which is not modeled yet", f"use {', '.join(_RECOMPUTED)}")
        elif modules != ["core_attn"]:
            reading.put("plan.recompute_modules", [_RECOMPUTED[each] for each in modules], key)

    def _read_sharding(self) -> None:
        """Replicas or shards of the optimizer; ``simplan.scenario.source`` fills in their number from the devices."""
        reading = self.reading
        if self.software == DEEPSPEED:
            self._read_zero_stage()
            return
        fsdp = next((key for key in ("--use-megatron-fsdp", "--use-custom-fsdp") if key in reading), "")
        strategy = reading.value("--data-parallel-sharding-strategy", "no_shard")
        if fsdp and strategy not in ("no_shard", "optim"):
            rule = f"with {strategy} is Megatron's FSDP, which is not modeled; simplan models FSDP2 of torch"
            reading.refuse(
                fsdp, rule, "use --data-parallel-sharding-strategy optim, or import it and set software: torch"
            )
            return
        reading.value(fsdp)
        key = "--use-distributed-optimizer"
        if key in reading or (fsdp and strategy == "optim"):
            key = key if key in reading else fsdp
            reading.put("plan.zero_stage", 1, key)
            replicas = reading.value("--num-distributed-optimizer-instances", 1)
            given = "--num-distributed-optimizer-instances" in reading
            reading.put(
                "plan.dp_replicate",
                replicas,
                "--num-distributed-optimizer-instances"
                if given
                else f"with {key}, all data-parallel ranks share optimizer states",
            )
        elif not self._is_unsure(key):
            reading.put("plan.dp_shard", 1, f"without {key}, data-parallel ranks are replicas")
        bucket = reading.value("--ddp-bucket-size")
        if isinstance(bucket, int) and "--overlap-grad-reduce" in reading:
            width = 2 if "--grad-reduce-in-bf16" in reading else 4
            reading.put("plan.bucket_bytes", bucket * width, "--ddp-bucket-size")
        reading.no_effect("--ddp-bucket-size")
        reading.no_effect("--overlap-grad-reduce", "--overlap-param-gather", "--tp-comm-overlap")
        reading.no_effect("--num-distributed-optimizer-instances", "--data-parallel-sharding-strategy")

    def _read_zero_stage(self) -> None:
        reading, key = self.reading, "--zero-stage"
        if key in reading and reading.value(key) == 0 and "--bf16" in reading:
            own = "with --bf16, whose optimizer in DeepSpeed shards its states at --zero-stage 0"
            reading.put("plan.zero_stage", 1, own)
            reading.put("plan.dp_replicate", 1, "BF16_Optimizer shards over all data-parallel ranks")
        elif key in reading:
            stage = reading.value(key)
            reading.put("plan.zero_stage", stage, key)
            path = "plan.dp_replicate" if stage != 0 else "plan.dp_shard"
            reading.put(path, 1, f"with {key} {stage}")
        elif not self._is_unsure(key):
            what = "has its ZeRO stage in the JSON of --deepspeed_config, which is not read"
            reading.ask("plan.zero_stage", what=what, fix="add --set plan.zero_stage=1")

    def _read_training(self) -> None:
        reading = self.reading
        reading.match(TRAINING)
        self._read_precision()
        steps = "--step-batch-size-schedule"
        if "--global-batch-size" not in reading and steps in reading:
            last = str(reading.value(steps)).strip("[]'\" ").rpartition(":")[2]
            if last.isdecimal():
                reading.put("training.global_batch_size", int(last), steps)
            else:
                reading.refuse(steps, "has no batch at its end", "write START:BATCH START:BATCH ...")
        elif "--global-batch-size" not in reading and not self._is_unsure("--global-batch-size"):
            reading.put("num_microbatches", 1, f"{_DEFAULT}: the global batch is one microbatch per data-parallel rank")
        core.read_clipping(reading, "--clip-grad")
        for key, dtype in (("--grad-reduce-in-bf16", "bf16"), ("--accumulate-allreduce-grads-in-fp32", "fp32")):
            if key in reading:
                reading.put("plan.grad_dtype", dtype, key)
                break
        reading.no_effect("--accumulate-allreduce-grads-in-fp32")
        length, batch = self.value("--seq-length"), self.value("--global-batch-size")
        steps, samples = reading.value("--train-iters"), reading.value("--train-samples")
        key = "--train-samples" if samples is not None else "--train-iters"
        if isinstance(samples, int | float) and isinstance(length, int) and samples > 0:
            reading.put("training.num_tokens", float(samples * length), key)
        elif isinstance(steps, int) and isinstance(length, int) and isinstance(batch, int) and steps > 0:
            reading.put("training.num_tokens", float(steps * batch * length), key)

    def _read_precision(self) -> None:
        reading, path = self.reading, "training.precision"
        fp8 = next((key for key in ("--fp8-format", "--fp8-hybrid", "--fp8-e4m3") if key in reading), "")
        wide = next((key for key in ("--bf16", "--fp16") if key in reading), "")
        recipe, fp4 = (
            str(reading.value("--fp8-recipe", "delayed")),
            next((key for key in ("--fp4-format", "--fp4") if key in reading), ""),
        )
        if fp4:
            reading.put(path, "nvfp4", fp4)
        elif fp8 and recipe == "mxfp8":
            reading.put(path, "mxfp8", fp8)
        elif fp8:
            reading.put(path, "fp8", fp8)
            if recipe == "tensorwise":
                reading.value("--fp8-recipe")  # simplan's default
            elif recipe in _FP8_RECIPES:
                reading.put("training.fp8_recipe", recipe, "--fp8-recipe" if "--fp8-recipe" in reading else _DEFAULT)
            else:
                reading.refuse("--fp8-recipe", "is not modeled yet", f"only {', '.join(_FP8_RECIPES)} and mxfp8 are")
        elif wide:
            reading.put(path, wide.lstrip("-"), wide)
        elif not self._is_unsure("--bf16", "--fp16", "--fp8-format"):
            reading.put(path, "fp32", "without --bf16 and --fp16")
        reading.no_effect("--bf16", "--fp8-recipe")
        if "--fp8-dot-product-attention" in reading and self.software == CORE and (fp8 or fp4):
            reading.put("software.fp8_dot_product_attention", True, "--fp8-dot-product-attention")

    def _read_devices(self) -> None:
        reading, devices = self.reading, self.arguments.num_devices
        if devices is not None:
            reading.put("cluster.num_devices", devices, _NUM_DEVICES)
        else:
            what, fix = "does not say how many devices there are", "add --num-devices 64"
            reading.ask("cluster.num_devices", "cluster.num_nodes", what=what, fix=fix)
        reading.ask(
            "cluster.preset", "cluster.device", what="does not say what the devices are", fix="add --cluster dgx-h100"
        )

    def _sort_rest(self) -> None:
        """Sort arguments that nothing has looked at."""
        reading = self.reading
        for key, why in NOT_MODELED.items():
            reading.not_modeled(key, why)
        if not _is_above(self.value("--num-experts"), 1):
            reading.no_effect(*(key for key in reading.settings if key == "--num-experts" or key.startswith("--moe-")))
        reading.no_effect(*(key for key in reading.settings if alike(NO_EFFECT, key)))
        for setting, why in self.arguments.unsure:
            known = alike(NO_EFFECT, setting.key) and setting.key not in _ASKED
            if known or setting.key in ("--vocab-file", "--load", "--save"):
                reading.settings[setting.key] = setting
                reading._left[setting.key] = setting
                reading.no_effect(setting.key)
            elif setting.key not in _ASKED:
                reading.settings[setting.key] = setting
                reading.not_modeled(setting.key, f"{why}; read without it")


def _preset_of(tokenizer: Any) -> str | None:
    """Model of the catalog that a tokenizer is named after: ``deepseek-ai/DeepSeek-V3``; None for none."""
    name = _plain_name(str(tokenizer or ""))
    named = [preset for preset in catalog.names("models") if _plain_name(preset) in name]
    return max(named, key=len, default=None)


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


def _option(path: str) -> str:
    return _OPTIONS.get(path, f"--set {path}=...")


def _is_above(value: Any, limit: int) -> bool:
    return isinstance(value, int | float) and value > limit


def _pattern(value: Any) -> int | list[int] | None:
    """Number, or a Python list of numbers: ``([0]*3+[1]*58)``; None for anything else."""
    if isinstance(value, int):
        return value
    text = "".join(map(str, value)) if isinstance(value, list) else str(value)
    if len(text) > _MAX_PATTERN:
        return None
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return None
    found = _evaluated(tree.body)
    return found if isinstance(found, int | list) else None


def _evaluated(node: ast.expr) -> int | list[int] | None:
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, int) and 0 <= node.value <= _MAX_LAYERS else None
    if isinstance(node, ast.List):
        items = [_evaluated(item) for item in node.elts]
        return [item for item in items if isinstance(item, int)]
    if isinstance(node, ast.BinOp):
        left, right = _evaluated(node.left), _evaluated(node.right)
        if isinstance(node.op, ast.Add) and isinstance(left, list) and isinstance(right, list):
            return left + right
        if isinstance(node.op, ast.Mult) and isinstance(left, list) and isinstance(right, int):
            return left * right if len(left) * right <= _MAX_LAYERS else None
    return None
