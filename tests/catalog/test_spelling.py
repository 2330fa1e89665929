"""Names that people type: those of the Hugging Face Hub, of nvidia-smi and of clouds, against a table and laws."""

from __future__ import annotations

from collections.abc import Iterator

from simplan import catalog
from simplan.catalog.spelling import NamedNodes, find, find_nodes, words_of

TYPED: dict[catalog.Kind, dict[str, str]] = {
    # ids of the Hub, and names in papers and model cards
    "models": {
        "gpt2": "GPT-2 | openai-community/gpt2 | GPT2 124M",
        "gpt2-xl": "openai-community/gpt2-xl | GPT-2 XL | GPT-2 XL (1.5B)",
        "gpt3-175b": "GPT-3 | GPT-3 175B | openai/GPT3-175B",
        "llama2-7b": "meta-llama/Llama-2-7b-hf | meta-llama/Llama-2-7b-chat-hf | LLaMA2 7B | huggyllama/llama-7b",
        "llama2-13b": "NousResearch/Llama-2-13b-hf | llama-2-13b | lmsys/vicuna-13b-v1.5",
        "llama2-70b": "meta-llama/Llama-2-70b-chat-hf | Llama 2 70B",
        "llama3-8b": "meta-llama/Meta-Llama-3-8B | Llama 3 8B | Llama3 8b | llama_3_8b | unsloth/llama-3-8b-Instruct | "
        "deepseek-ai/DeepSeek-R1-Distill-Llama-8B",
        "llama3-70b": "meta-llama/Meta-Llama-3-70B-Instruct | Llama 3 70B | Meta Llama 3 70 B | 70B Llama 3",
        "llama3.1-8b": "meta-llama/Llama-3.1-8B | meta-llama/Llama-3.1-8B-Instruct | Meta-Llama-3.1-8B | Llama 3.1 8B",
        "llama3.1-405b": "meta-llama/Llama-3.1-405B | Llama 3.1 405B",
        "llama3.2-1b": "meta-llama/Llama-3.2-1B-Instruct | Llama 3.2 1B",
        "llama3.3-70b": "meta-llama/Llama-3.3-70B-Instruct",
        "mistral-7b": "Mistral 7B",
        "mistral-7b-v0.1": "mistralai/Mistral-7B-v0.1 | mistralai/Mistral-7B-Instruct-v0.1",
        "mistral-7b-v0.3": "mistralai/Mistral-7B-Instruct-v0.3",
        "mistral-nemo-12b": "mistralai/Mistral-Nemo-Instruct-2407",
        "qwen1.5-7b": "Qwen/Qwen-7B-Chat | qwen-1.5-7B | Qwen1.5-7B",
        "qwen2.5-72b": "Qwen/Qwen2-72B-Instruct",
        "deepseek-r1-distill-qwen-1.5b": "deepseek-ai/DeepSeek-R1-Distill-Qwen-1.5B",
        "yi-34b": "01-ai/Yi-1.5-34B-Chat | 01-ai/Yi-34B",
        "tinyllama-1.1b": "TinyLlama/TinyLlama_v1.1 | TinyLlama/TinyLlama-1.1B-Chat-v1.0",
        "smollm2-1.7b": "HuggingFaceTB/SmolLM2-1.7B-Instruct | HuggingFaceTB/SmolLM-1.7B",
        "llama-65b": "huggyllama/llama-65b",
        "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1 | mistralai/Mixtral-8x7B-Instruct-v0.1 | Mixtral 8x7B",
        "qwen2.5-7b": "Qwen/Qwen2.5-7B-Instruct | Qwen 2.5 7B | Qwen/Qwen2.5-Coder-7B",
        "qwen3-8b": "Qwen/Qwen3-8B-Base | Qwen3 8B",
        "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B-Instruct-2507 | Qwen3-30B",
        "qwen1.5-moe-a2.7b": "Qwen/Qwen1.5-MoE-A2.7B-Chat",
        "gemma-2-9b": "google/gemma-2-9b-it | Gemma 2 9B",
        "gemma-3-27b": "google/gemma-3-27b-it | Gemma 3 27B",
        "deepseek-v3": "deepseek-ai/DeepSeek-V3-0324 | DeepSeek V3 671B | DeepSeekV3",
        "deepseek-r1": "deepseek-ai/DeepSeek-R1-0528 | DeepSeek R1",
        "deepseek-v2-lite": "deepseek-ai/DeepSeek-V2-Lite-Chat",
        "olmoe-1b-7b": "allenai/OLMoE-1B-7B-0924-Instruct | OLMoE",
        "gpt-oss-20b": "openai/gpt-oss-20b | GPT OSS 20B",
        "gpt-neox-20b": "EleutherAI/gpt-neox-20b | GPT-NeoX 20B",
        "pythia-12b": "EleutherAI/pythia-12b-deduped | Pythia 12B",
        "mpt-7b-alibi": "mosaicml/mpt-7b",
        "bert-large": "google-bert/bert-large-uncased | BERT-Large",
        "vit-b16": "google/vit-base-patch16-224 | ViT-B/16 | vit_b_16",
        "t5-v1.1-xxl": "google/t5-v1_1-xxl | google/flan-t5-xxl",
        "resnet-50": "microsoft/resnet-50 | ResNet50",
    },
    # as nvidia-smi and vendors print them, and the short names of shops
    "devices": {
        "h100-sxm-80gb": "NVIDIA H100 80GB HBM3 | H100 SXM | H100-SXM5-80GB",
        "h100-pcie-80gb": "NVIDIA H100 PCIe",
        "h100-nvl-94gb": "NVIDIA H100 NVL | H100 94GB",
        "h200-sxm": "NVIDIA H200 | H200 141GB",
        "b200-sxm": "NVIDIA B200 | B200 180 GB",
        "gh200": "NVIDIA GH200 480GB | GH200",
        "a100-sxm-80gb": "NVIDIA A100-SXM4-80GB | A100 SXM 80 GB",
        "a100-sxm-40gb": "NVIDIA A100-SXM4-40GB",
        "a100-pcie-80gb": "NVIDIA A100 80GB PCIe",
        "v100-sxm2-16gb": "Tesla V100-SXM2-16GB",
        "rtx-5090": "NVIDIA GeForce RTX 5090 | 5090 | RTX5090",
        "rtx-pro-6000": "RTX PRO 6000 | PRO 6000",
        "rtx-4090": "NVIDIA GeForce RTX 4090 | 4090 | RTX4090 | 4090 24GB",
        "rtx-3090": "3090",
        "rtx-6000-ada": "NVIDIA RTX 6000 Ada Generation | 6000 Ada",
        "a6000": "NVIDIA RTX A6000 | A6000",
        "a10g": "NVIDIA A10G",
        "a10": "NVIDIA A10",
        "l40s": "NVIDIA L40S",
        "l4": "NVIDIA L4 | L4 24GB",
        "t4": "Tesla T4 | T4 16GB",
        "mi300x": "AMD Instinct MI300X | MI300X 192GB | MI300X OAM",
        "mi250x": "AMD Instinct MI250X",
        "gaudi2": "Intel Gaudi 2",
        "trainium2": "AWS Trainium2 | trn2",
        "tpu-v5p": "TPU v5p | v5p | Cloud TPU v5p",
        "tpu-v4": "TPUv4",
        "tpu-v6e": "Trillium",
    },
    "software": {
        "torch": "PyTorch | FSDP2 | PyTorch FSDP",
        "megatron-core": "Megatron-Core | megatron core | mcore",
        "torchtitan": "TorchTitan",
        "deepspeed": "DeepSpeed | Microsoft DeepSpeed",
        "transformers": "Hugging Face Transformers",
        "accelerate": "HuggingFace Accelerate | TRL",
        "nemo": "NVIDIA NeMo | NeMo 2.0",
    },
    "links": {
        "nvlink4": "NVLink 4 | NVLink4",
        "pcie5": "PCIe Gen5 | PCIe 5.0",
        "network-400gbit": "InfiniBand 400 Gbit",
    },
    "topologies": {"superpod-h100": "DGX SuperPOD H100"},
}
SEVERAL: dict[catalog.Kind, dict[str, str]] = {
    "models": {"llama3": "llama3-8b llama3-70b llama3-405b", "bert": "bert-tiny bert-base bert-large"},
    "devices": {
        "H100": "h100-sxm-80gb h100-nvl-94gb h100-pcie-80gb",
        "a100": "a100-sxm-80gb a100-pcie-80gb a100-sxm-40gb a100-pcie-40gb",
        "A100 80GB": "a100-sxm-80gb a100-pcie-80gb",
        "TPU v5": "tpu-v5p tpu-v5e",
    },
    "software": {"megatron-lm": "megatron-core megatron-lm-2021 megatron-lm-2022 megatron-lm-2023"},
}
OTHERS: dict[catalog.Kind, str] = {
    "models": "mistralai/Mistral-7B-Instruct-v0.2 | Qwen/Qwen-72B | Qwen/Qwen2-57B | "
    "codellama/CodeLlama-7b-hf | deepseek-ai/DeepSeek-R1-Distill-Llama-7B | Llama 4 Scout | "
    "unsloth/llama-3-8b-bnb-4bit | mosaicml/mpt-30b | "
    "TinyLlama-3B | microsoft/phi-2 | llama3-8b.yaml | tiny | 8x",
    "devices": "RTX 4090 Ti | 4090D | MI300A | H200 NVL | RTX 6000 | V100S | A100 60GB",
    "software": "fsdp1 | keras",
    "links": "NVLink | ethernet",
}
"""Names of something that the catalog does not have."""


def listed(table: dict[str, str]) -> Iterator[tuple[str, str]]:
    return ((typed, name) for name, names in table.items() for typed in names.split(" | "))


def test_typed_names_stand_for_their_entries() -> None:
    typed = [(kind, text, name) for kind, table in TYPED.items() for text, name in listed(table)]
    assert len(typed) > 130
    for kind, text, name in typed:
        entry = find(kind, text).name
        assert catalog.canonical_name(kind, entry) == catalog.canonical_name(kind, name), f"{text} is {entry}"


def test_names_of_several_entries_and_of_others_stand_for_none() -> None:
    for kind, table in SEVERAL.items():
        for text, names in table.items():
            assert (find(kind, text).name, set(find(kind, text).candidates)) == ("", set(names.split())), text
    assert [(text, find(kind, text).name) for kind, names in OTHERS.items() for text in names.split(" | ")] == [
        (text, "") for names in OTHERS.values() for text in names.split(" | ")
    ]


def test_name_of_the_catalog_stands_for_itself_in_any_style() -> None:
    for kind in ("models", "devices", "clusters", "software", "topologies", "links"):
        for name in catalog.names(kind):
            for text in (name, name.upper(), name.replace("-", " "), name.replace("-", "_"), f"  {name.title()} "):
                entry = find(kind, text).name
                assert catalog.canonical_name(kind, entry) == catalog.canonical_name(kind, name), text
            assert find(kind, name).name == name
        for name, others in catalog.spellings()[kind].get("spellings", {}).items():
            assert name in catalog.names(kind), f"{name} is no entry"
            assert {find(kind, other).name for other in others} == {name}


def test_name_without_or_with_another_word_is_never_another_entry() -> None:
    """A name that stands for another entry has all words of one of that entry's names."""
    kinds: tuple[catalog.Kind, ...] = ("models", "devices", "links")
    for kind in kinds:
        others = catalog.spellings()[kind].get("spellings", {})
        for name in catalog.names(kind):
            words = words_of(name)
            for place, word in enumerate(words):
                changed = "".join(str((int(digit) + 1) % 10) if digit.isdecimal() else digit for digit in word)
                for other in ((), (changed,)) if changed != word else ((),):
                    text = " ".join((*words[:place], *other, *words[place + 1 :]))
                    entry = find(kind, text).name
                    if entry and catalog.canonical_name(kind, entry) != catalog.canonical_name(kind, name):
                        names = (entry, *others.get(entry, ()))
                        assert sorted(words_of(text)) in [sorted(words_of(spelled)) for spelled in names], (
                            f"{text} is {entry}"
                        )


def test_numbers_in_a_name_are_those_of_nodes_or_devices() -> None:
    expected = {
        "8x H100": NamedNodes("dgx-h100", num_devices=8),
        "8xH100 | 8 H100s | H100 x8 | 8\N{MULTIPLICATION SIGN} H100 | 8x NVIDIA H100 80GB HBM3": NamedNodes(
            "dgx-h100", num_devices=8
        ),
        "64 H100 GPUs": NamedNodes("dgx-h100", num_devices=64),
        "2x8 H100 | 2 x 8 x H100 | 2 nodes of 8 H100": NamedNodes("dgx-h100", num_nodes=2, devices_per_node=8),
        "4x DGX H100 | 4 DGX H100 nodes | 4x HGX H100": NamedNodes("dgx-h100", num_nodes=4),
        "4x p5.48xlarge": NamedNodes("p5.48xlarge", num_nodes=4),
        "8x A100 80GB | 8x A100-SXM4-80GB": NamedNodes("dgx-a100-80gb", num_devices=8),
        "8x A100 80GB PCIe": NamedNodes("", "a100-pcie-80gb", num_devices=8),
        "4090": NamedNodes("", "rtx-4090"),
        "8x 4090 | 8x4090": NamedNodes("", "rtx-4090", num_devices=8),
        "2x8 4090": NamedNodes("", "rtx-4090", num_nodes=2, devices_per_node=8),
        "GB200 NVL72 | GB200": NamedNodes("gb200-nvl72"),
    }
    for texts, nodes in expected.items():
        for text in texts.split(" | "):
            assert find_nodes(text) == nodes, text
    for text, names in {
        "8x A100": "dgx-a100-40gb dgx-a100-80gb",
        "8x V100 16GB": "v100-sxm2-16gb v100-pcie-16gb",
    }.items():
        match = find_nodes(text)
        assert not isinstance(match, NamedNodes)
        assert match.candidates == tuple(names.split())
    assert not isinstance(find_nodes("8x7b"), NamedNodes)
