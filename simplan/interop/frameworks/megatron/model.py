"""Model of Megatron-LM's arguments: family, sizes, experts, attention and vocabulary."""

from __future__ import annotations

import ast
import re
from typing import TYPE_CHECKING, Any

from simplan import catalog
from simplan.interop.frameworks import tables
from simplan.interop.frameworks.megatron.arguments import is_above
from simplan.interop.frameworks.megatron.options import CORE, DEFAULT, EXPERTS, LATENT_ATTENTION, MODEL, T5

if TYPE_CHECKING:  # a reading calls these functions
    from simplan.interop.frameworks.megatron.reading import MegatronReading

_MAX_LAYERS, _MAX_PATTERN = 10_000, 1_000
_VOCABULARY_KEYS = ("--padded-vocab-size", "--pad-vocab-size-to", "--vocab-size")


def read_model(reading: MegatronReading) -> None:
    """Put the section ``model``."""
    if not {"--num-layers", "--hidden-size"} & reading.settings.keys() and not reading.is_unsure("--num-layers"):
        reading.ask(
            "model.preset", "model.hf_config", what="does not say the sizes of the model", fix="add --model NAME"
        )
        reading.match([match for match in MODEL if match.path == "model.seq_len"])
    else:
        reading.match(MODEL)
        _read_family(reading)
        _read_vocabulary(reading)
    if "--seq-length" not in reading and not reading.is_unsure("--seq-length"):
        reading.ask("model.seq_len", what="does not say how long sequences are", fix="add --seq-len 4096")


def _read_family(reading: MegatronReading) -> None:
    program = reading.program.lower()
    gated = "--swiglu" in reading or ("--quick-geglu" in reading and "--glu-linear-offset" in reading)
    if "t5" in program:
        family = "t5"
    elif "bert" in program:
        family = "bert"
    elif "--multi-latent-attention" in reading:
        family = "deepseek"
    elif is_above(reading.peek("--num-experts"), 1):
        family = "moe"
    else:
        family = "llama" if gated else "gpt"
    sign = {"deepseek": "--multi-latent-attention", "moe": "--num-experts", "llama": "--swiglu"}.get(family, "")
    reading.put("model.family", family, sign if sign in reading else reading.arguments.program or DEFAULT)
    if family in ("moe", "deepseek") and not gated:
        reading.refuse("--num-experts", "has experts without --swiglu, which are not modeled yet", "add --swiglu")
    if family == "deepseek" and not is_above(reading.peek("--num-experts"), 1):
        reading.refuse("--multi-latent-attention", "without --num-experts is not modeled yet")
    for key in ("--swiglu", "--quick-geglu", "--glu-linear-offset") if gated else ():
        reading.value(key)
    _read_sizes(reading, family, gated=gated)
    if family not in ("t5", "bert"):
        _note_differences(reading, family)
    _note_dropout(reading, family)


def _read_sizes(reading: MegatronReading, family: str, *, gated: bool) -> None:
    hidden = reading.peek("--hidden-size")
    if family in ("moe", "deepseek") and "--moe-layer-freq" not in reading:
        if "--moe-ffn-hidden-size" in reading:
            reading.no_effect("--ffn-hidden-size")  # of blocks without experts
    elif reading.copy("model.intermediate_size", "--ffn-hidden-size") or reading.is_unsure("--ffn-hidden-size"):
        pass
    elif isinstance(hidden, int):
        size = int(4 * hidden * 2 / 3 / 64) * 64 if gated else 4 * hidden
        reading.put("model.intermediate_size", size, f"{DEFAULT}, by --hidden-size")
    if family != "deepseek":
        reading.copy("model.head_dim", "--kv-channels")
    reading.no_effect("--kv-channels")
    if family in ("llama", "moe", "gpt"):
        _read_groups(reading)
    reading.no_effect("--group-query-attention", "--num-query-groups")
    untied = "--untie-embeddings-and-output-weights" in reading
    key = "--untie-embeddings-and-output-weights"
    if family not in ("t5", "bert") or untied:
        reading.put("model.tied_embeddings", not untied, key if untied else DEFAULT)
    if family == "t5":
        reading.match(T5)
        reading.value("--max-position-embeddings")
        reading._data.get("model", {}).pop("max_position_embeddings", None)
    if family in ("moe", "deepseek"):
        _read_experts(reading)
    if family == "deepseek":
        reading.match(LATENT_ATTENTION)
        reading.value("--multi-latent-attention")
    _read_attention(reading, family)


def _read_groups(reading: MegatronReading) -> None:
    """Groups of heads that share keys and values."""
    path, heads = "model.num_key_value_heads", reading.peek("--num-attention-heads")
    if reading.copy(path, "--num-key-value-heads"):
        return
    if "--group-query-attention" not in reading:
        if isinstance(heads, int):
            reading.put(path, heads, "without --group-query-attention, one for each head")
    elif reading.value("--group-query-attention") and not reading.copy(path, "--num-query-groups"):
        reading.put(path, 1, DEFAULT)


def _read_experts(reading: MegatronReading) -> None:
    reading.match(EXPERTS)
    if not reading.copy("model.moe_intermediate_size", "--moe-ffn-hidden-size", "--ffn-hidden-size"):
        what, fix = "does not say how wide experts are", "add --set model.moe_intermediate_size=1408"
        reading.ask("model.moe_intermediate_size", what=what, fix=fix)
    _read_dense_layers(reading)
    factor = reading.value("--moe-expert-capacity-factor")
    if factor is not None:
        number = float(factor) if isinstance(factor, int | float) else factor
        reading.put("model.capacity_factor", number, "--moe-expert-capacity-factor")
        reading.put("model.drop_tokens", True, "--moe-expert-capacity-factor")
    if reading.software == CORE and not reading.is_unsure("--moe-token-dispatcher-type"):
        _read_dispatch(reading)
    reading.no_effect("--moe-permute-fusion")
    if not reading.value("--moe-grouped-gemm", False):
        what = "without --moe-grouped-gemm, experts run one after another, which takes longer"
        reading.not_modeled("--num-experts", what)


def _read_dense_layers(reading: MegatronReading) -> None:
    """``--moe-layer-freq``: every how many blocks have experts, or a Python list of 0 and 1 by block."""
    layers = reading.peek("--num-layers")
    key = "--moe-layer-freq"
    if key not in reading:
        return
    pattern = _pattern(reading.value(key))
    if pattern == 1:
        reading.no_effect(key)
        return
    if not isinstance(pattern, list) or not isinstance(layers, int) or len(pattern) != layers:
        rule = "is an order of blocks that is not modeled yet" if isinstance(pattern, list | int) else "cannot be read"
        reading.refuse(key, rule, "write blocks without experts first: ([0]*3+[1]*58)")
        return
    dense = pattern.index(1) if 1 in pattern else len(pattern)
    if 0 in pattern[dense:] or 1 not in pattern:
        reading.refuse(key, "has blocks without experts after those with experts, which is not modeled yet")
        return
    reading.put("model.num_dense_layers", dense, key)


def _read_dispatch(reading: MegatronReading) -> None:
    kind = reading.value("--moe-token-dispatcher-type", "allgather")
    backend = reading.value("--moe-flex-dispatcher-backend", "deepep")
    fused = "--moe-permute-fusion" in reading
    reading.value("--moe-permute-fusion"), reading.value("--moe-enable-deepep")
    if kind == "flex":
        dispatch, key = str(backend), "--moe-token-dispatcher-type"
    else:
        dispatch, key = "all_to_all" if fused else "copies", "--moe-permute-fusion"
    reading.put("software.expert_dispatch", dispatch, key if key in reading else f"{DEFAULT}, without {key}")
    if kind == "allgather":
        if "--moe-token-dispatcher-type" in reading:
            reading.not_modeled("--moe-token-dispatcher-type", "tokens are dispatched by all-to-all")
        elif is_above(reading.peek("--expert-model-parallel-size"), 1):
            what = "the default dispatcher is allgather; here it is all-to-all"
            reading.not_modeled("--expert-model-parallel-size", what)
    if "--overlap-moe-expert-parallel-comm" in reading:
        reading.put("software.expert_overlap", True, "--overlap-moe-expert-parallel-comm")


def _read_attention(reading: MegatronReading, family: str) -> None:
    biased = "--disable-bias-linear" not in reading
    if family in ("llama", "moe"):
        reading.value("--disable-bias-linear")
        if biased:
            reading.put("model.attention_bias", True, f"{DEFAULT}, without --disable-bias-linear")
        elif "--add-qkv-bias" in reading:
            reading.put("model.qkv_bias", True, "--add-qkv-bias")
        if "--qk-layernorm" in reading:
            reading.put("model.qk_norm", "head", "--qk-layernorm")
        _read_window(reading)
        if family == "moe" and reading.peek("--softmax-type") == "learnable":
            reading.put("model.attention_sinks", True, "--softmax-type")
        if family == "moe" and biased:
            reading.put("model.expert_bias", True, f"{DEFAULT}, without --disable-bias-linear")
    elif family != "gpt":
        reading.no_effect("--disable-bias-linear")
    if family == "deepseek":
        reading.no_effect("--qk-layernorm")  # of the latent vectors, which simplan's latent attention has
    if family != "bert" and "--mtp-num-layers" in reading and is_above(reading.peek("--mtp-num-layers"), 0):
        if family == "gpt":
            reading.refuse("--mtp-num-layers", "is not modeled with blocks of GPT", "remove it")
        else:
            reading.put("model.mtp_num_layers", reading.value("--mtp-num-layers"), "--mtp-num-layers")


def _read_window(reading: MegatronReading) -> None:
    """``--window-size LEFT,RIGHT``, and ``--window-attn-skip-freq``: period whose last block has no window."""
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
            reading.refuse("--window-attn-skip-freq", "is an order of blocks that is not modeled yet", "give a number")
            return
        pattern = period
    if pattern is not None:
        reading.put("model.sliding_window_pattern", pattern, "--window-attn-skip-freq")


def _note_differences(reading: MegatronReading, family: str) -> None:
    """Note parts of the blocks that the family has in another form."""
    rms = str(reading.value("--normalization", "LayerNorm")).lower() == "rmsnorm"
    positions = reading.value("--position-embedding-type")
    rotary = positions in ("rope", "yarn", "mrope") or reading.value("--use-rotary-position-embeddings", False)
    if family in ("llama", "moe", "deepseek"):
        if not rms:
            key = "--normalization" if "--normalization" in reading else "--hidden-size"
            reading.not_modeled(key, "LayerNorm is predicted as RMSNorm, whose time is nearly the same")
        if not rotary and not reading.value("--no-position-embedding", False):
            reading.not_modeled("--max-position-embeddings", "learned positions are predicted as rotary ones")
        if family == "llama" and "--disable-bias-linear" not in reading:
            reading.not_modeled("--swiglu", "biases of the MLP are left out, which are a few numbers per row")
    elif family == "gpt":
        if rotary:
            key = "--use-rotary-position-embeddings" if positions is None else "--position-embedding-type"
            reading.not_modeled(
                key, "rotary positions are predicted as learned ones; the rotation takes a little longer"
            )
        elif positions not in (None, "learned_absolute"):
            what = "is predicted as learned positions, whose time is nearly the same"
            reading.not_modeled("--position-embedding-type", what)
        if "--disable-bias-linear" in reading:
            what = "biases are predicted nevertheless, which are a few numbers per row"
            reading.not_modeled("--disable-bias-linear", what)
        reading.not_modeled("--squared-relu", "predicted as GELU")
        if rms:
            reading.not_modeled("--normalization", "predicted as LayerNorm")
        reading.not_modeled("--qk-layernorm", "norms of queries and keys are left out")
        reading.not_modeled("--add-qkv-bias", "predicted as all biases")
    fusion = "--cross-entropy-loss-fusion"
    if reading.software == CORE and not (
        reading.value(fusion, False) and reading.value("--cross-entropy-fusion-impl") == "te"
    ):
        what = "the loss is predicted as with --cross-entropy-fusion-impl te; Megatron's own has FP32 logits, too"
        reading.not_modeled(fusion if fusion in reading else "--hidden-size", what)


def _note_dropout(reading: MegatronReading, family: str) -> None:
    has = family in ("gpt", "bert", "t5")
    for key in ("--hidden-dropout", "--attention-dropout"):
        dropout = reading.value(key, 0.1)
        if (dropout > 0 if isinstance(dropout, int | float) else True) == has:
            reading.no_effect(key)
            reading.value(key)
        elif key in reading:
            added = "dropout is predicted nevertheless, which takes longer and more memory"
            reading.not_modeled(key, added if has else "dropout is left out")
        elif "--hidden-size" in reading and key == "--hidden-dropout":
            reading.not_modeled("--hidden-size", "the default of Megatron-LM is dropout of 0.1, which is left out")


def _read_vocabulary(reading: MegatronReading) -> None:
    path = "model.vocab_size"
    vocabularies, defaults = tables("megatron")["vocabularies"], tables("megatron")["default_tokenizers"]
    sized = next((key for key in _VOCABULARY_KEYS if key in reading), None)
    if sized is not None:
        reading.put(path, reading.value(sized), sized)
        for key in _VOCABULARY_KEYS:
            reading.value(key)
        reading.no_effect("--vocab-extra-ids")
        return
    kind, tokenizer = reading.value("--tokenizer-type"), reading.value("--tokenizer-model")
    if isinstance(kind, str) and kind in vocabularies and not _has_own_vocabulary(reading, kind):
        extra = reading.value("--vocab-extra-ids", 0)
        reading.put(path, vocabularies[kind] + (extra if isinstance(extra, int) else 0), "--tokenizer-type")
    elif kind is None and reading.program in defaults and "--tokenizer-model" not in reading._all_keys():
        default = defaults[reading.program]
        reading.put(path, vocabularies[default], f"{default}, the default of {reading.program}")
    elif (preset := _preset_of(tokenizer)) is not None:
        size = catalog.model(preset).vocab_size
        reading.put(path, size, "--tokenizer-model")
    elif not reading.is_unsure(*_VOCABULARY_KEYS):
        of = f" (its tokenizer is {kind})" if isinstance(kind, str) else ""
        what = f"does not say how many entries the vocabulary has{of}"
        reading.ask(path, "model.preset", what=what, fix="add --set model.vocab_size=128256")
    reading.no_effect("--vocab-extra-ids")


def _has_own_vocabulary(reading: MegatronReading, kind: str) -> bool:
    """True if a SentencePiece file has another name than Llama 2's: then nothing says how large it is."""
    model = reading.settings.get("--tokenizer-model")
    return kind == "Llama2Tokenizer" and model is not None and not str(model.value).endswith("tokenizer.model")


def _preset_of(tokenizer: Any) -> str | None:
    """Model of the catalog that a tokenizer is named after: ``deepseek-ai/DeepSeek-V3``; None for none."""
    name = _plain_name(str(tokenizer or ""))
    named = [preset for preset in catalog.names("models") if _plain_name(preset) in name]
    return max(named, key=len, default=None)


def _plain_name(name: str) -> str:
    return re.sub(r"[^a-z0-9.]", "", name.lower())


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
    pattern = _evaluated(tree.body)
    return pattern if isinstance(pattern, int | list) else None


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
