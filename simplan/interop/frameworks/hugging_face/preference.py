"""Preference training as TRL's programs, axolotl's and LLaMA-Factory's settings say it: task, reference model, loss.

Sources: TRL 1.16 (trainer/dpo_trainer.py, kto_trainer.py, reward_trainer.py, experimental/orpo, experimental/cpo) and
huggingface/trl at f2cd577; axolotl at 067b021 (train.py, ``setup_reference_model``; core/builders/rl.py);
LLaMA-Factory at ff6d4d1 (train/dpo, train/kto, train/rm; train/trainer_utils.py, ``create_ref_model``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from simplan.interop.frameworks.hugging_face.keys import whole
from simplan.training import REFERENCE_TASKS

if TYPE_CHECKING:  # which calls this module
    from simplan.interop.frameworks.hugging_face.run import TrainerRun

_OF_AXOLOTL = {"dpo": "dpo", "ipo": "dpo", "kto": "kto", "orpo": "orpo", "simpo": "simpo"}
_OF_FACTORY = {
    "sigmoid": "dpo", "hinge": "dpo", "ipo": "dpo", "kto_pair": "dpo", "orpo": "orpo", "simpo": "simpo",
}  # fmt: skip
"""``pref_loss`` of LLaMA-Factory -> task; losses of the same sums of log-probabilities cost the same."""
OF_PROGRAMS = {
    "dpo": "dpo",
    "kto": "kto",
    "orpo": "orpo",
    "cpo": "simpo",
    "reward": "reward",
    "reward_modeling": "reward",
}
"""Programs of TRL -> task; that of CPO is SimPO's with another ``loss_type``."""
SETTINGS = ("stage", "rl", "beta", "pref_beta")
"""Settings that say the task, or belong to one."""
_NO_EFFECT = (
    *SETTINGS, "rl_beta", "pref_loss", "pref_ftx", "orpo_alpha", "simpo_gamma", "cpo_alpha", "kto_desirable_weight",
    "kto_undesirable_weight", "kto_chosen_weight", "kto_rejected_weight", "desirable_weight", "undesirable_weight",
    "max_prompt_length", "max_completion_length", "dpo_label_smoothing", "label_smoothing", "dpo_loss_type",
    "loss_type", "loss_weights", "f_divergence_type", "f_alpha_divergence_coef", "reward_model", "num_labels",
    "center_rewards_coefficient", "dpo_norm_loss", "precompute_ref_batch_size", "truncation_mode",
)  # fmt: skip
"""Settings of losses on preferences that change neither time nor memory."""
_OTHERS = {
    "rpo_alpha": "the cross-entropy of chosen sequences reads the logits once more",
    "use_weighting": "weights of pairs read the logits once more",
    "dpo_use_weighting": "weights of pairs read the logits once more",
}
_LIGER = ("use_liger_kernel", "use_liger_loss", "dpo_use_liger_kernel")


def preference_task(run: TrainerRun) -> tuple[str, str] | None:
    """Task of preference training, and the setting or program that says it; None for another task, refused ones too."""
    trainer = run.trainer
    if trainer.is_true("reward_model") and run.is_axolotl:
        return "reward", trainer.full("reward_model")
    if "rl" in trainer and str(trainer.value("rl")).lower() in _OF_AXOLOTL:
        return _OF_AXOLOTL[str(trainer.value("rl")).lower()], trainer.full("rl")
    stage = str(trainer.value("stage", "")).lower()
    if run.is_factory and stage in ("", "sft") and trainer.is_true("use_asft_loss"):
        return "asft", trainer.full("use_asft_loss")
    if stage in ("kto", "rm"):
        return "kto" if stage == "kto" else "reward", trainer.full("stage")
    if stage == "dpo":
        loss = str(trainer.value("pref_loss", "sigmoid")).lower()
        if loss not in _OF_FACTORY:
            trainer.refuse("pref_loss", "is a loss that is not modeled yet", "use sigmoid, orpo or simpo")
        return _OF_FACTORY.get(loss, "dpo"), trainer.full("pref_loss" if "pref_loss" in trainer else "stage")
    if not run.preference:
        return None
    if run.preference[0] == "simpo" and str(trainer.value("loss_type", "sigmoid")).lower() != "simpo":
        rule, fix = "is CPO, whose cross-entropy of chosen sequences is not modeled yet", "use loss_type simpo"
        trainer.refuse("loss_type", rule, fix)
    return run.preference


def read_preference(run: TrainerRun, task: str, *, has_adapters: bool) -> None:
    """Read the reference model, and refuse what the frameworks refuse."""
    trainer = run.trainer
    if task == "asft":
        if has_adapters:
            rule = "needs a reference model, and LLaMA-Factory loads none with adapters (create_ref_model)"
            trainer.refuse("use_asft_loss", rule, "use finetuning_type full")
        trainer.no_effect(("use_asft_loss", "asft_alpha"))
    if task in REFERENCE_TASKS:
        _read_reference(run, has_adapters=has_adapters)
    for key in ("packing", "sample_packing", "padding_free", "dpo_padding_free"):
        if trainer.is_true(key) and not run.is_factory:
            trainer.refuse(key, "is not possible in preference training, where every sequence is padded", "use false")
    micro = whole(trainer.value("per_device_train_batch_size"))
    if task == "kto" and micro == 1 and not run.is_factory:
        rule = "leaves no other completion for the KL term of KTO, for which TRL refuses it"
        trainer.refuse("per_device_train_batch_size", rule, "use 2 or more")
    few_bits = next((key for key in ("load_in_4bit", "load_in_8bit") if trainer.is_true(key)), None)
    version = trainer.first("fsdp_version", "fsdp_config.fsdp_version") or ""
    if run.is_axolotl and task != "reward" and few_bits and whole(trainer.value(version)) == 2:
        trainer.refuse(
            few_bits, f"is refused by axolotl with FSDP2 and rl = {trainer.value('rl')}", "use fsdp_version 1"
        )
    if run.is_factory and task == "reward":
        trainer.put("training.preference", {"logits": True}, "stage")
    for key, why in _OTHERS.items():
        if trainer.value(key) not in (None, False, 0):
            trainer.not_modeled(key, why)
    trainer.no_effect((*_NO_EFFECT, "disable_dropout", "rl_adapter_ref_model", "precompute_ref_log_probs"))


def _read_reference(run: TrainerRun, *, has_adapters: bool) -> None:
    trainer = run.trainer
    fields: dict[str, Any] = {}
    key = "precompute_ref_log_probs"
    second = trainer.first("ref_model", "rl_adapter_ref_model", "force_use_ref_model")
    if trainer.is_true(key):
        fields = {"reference": "precomputed"}
    elif second is not None and (second == "ref_model" or trainer.is_true(second)):
        key, fields = second, {"reference": "second_model"} if has_adapters else {}
    for name in ("ref_model_quantization_bit", "ref_model_adapters", "sync_ref_model"):
        if trainer.value(name) not in (None, False):
            what = "moves the weights of the reference" if name == "sync_ref_model" else "changes the reference model"
            trainer.refuse(name, f"{what}, which is not modeled yet", "remove it")
    is_apart = fields.get("reference") == "second_model" or not (has_adapters or fields)
    if run.is_factory and is_apart and run.precision in ("bf16", "fp16"):  # loaded in the precision of computation
        key = key if key in trainer else "stage" if "use_asft_loss" not in trainer else "use_asft_loss"
        fields |= {"reference_dtype": run.precision}
    if fields:
        trainer.put("training.preference", fields, key)


def read_preference_loss(run: TrainerRun, task: str) -> None:
    """Read a loss in chunks: Liger's, or that of newer TRL, whose head gives log-probabilities tile by tile."""
    trainer = run.trainer
    if task not in REFERENCE_TASKS or run.is_factory:
        return
    for key in _LIGER:
        if trainer.is_true(key):
            trainer.put("software.loss", "fused", key)
            return
    if run.is_trl:
        where = "the default of TRL 1.16; --set software.loss=whole says otherwise for older ones"
        run.reading.put("software.loss", "recomputed", where)


def drops_dropout(run: TrainerRun, task: str) -> bool:
    """True if the trainer turns dropout off, as those of TRL do unless told otherwise, and LLaMA-Factory's of pairs."""
    return run.trainer.value("disable_dropout") is not False and not (run.is_factory and task == "reward")
