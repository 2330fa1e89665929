"""Recordings of loops in this process, against counts by hand, and what is refused."""

from __future__ import annotations

from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import _functional_collectives as functional

from executor.record import record
from executor.record.collectives import CollectiveLog
from executor.record.hugging_face import HuggingFaceCallback
from executor.record.loop import NUM_LOOKED_AT
from simplan.errors import RunError, SpecError
from simplan.io import read_model
from simplan.program.program import MemoryCategory
from simplan.runs.recording import RecordedCollective, Recording
from tests.support.problems import refuses, says

MIB = 2**20


class Scale(nn.Module):
    """One parameter of 4 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(MIB))

    def forward(self, number: int) -> Tensor:
        return (self.weight * torch.ones(number, MIB)).sum()


def test_recording_of_one_process_counts_what_its_steps_allocate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4 MiB of parameters, gradients and each of Adam's two states; the batch and its product, of 12 MiB each.

    A clock by hand goes on by a second from stamp to stamp.
    """
    clock = SimpleNamespace(perf_counter=map(float, count()).__next__)
    monkeypatch.setattr("executor.record.loop.time", clock)
    module = Scale()
    optimizer = torch.optim.Adam(module.parameters(), foreach=False)
    file = tmp_path / "loop.json"
    with record(file, samples_per_step=3, module=module, optimizer=optimizer) as run:
        for step in range(NUM_LOOKED_AT + 4):
            if step == NUM_LOOKED_AT + 2:
                clock.perf_counter()
                run.begin_step()
            module(3).backward()
            optimizer.step()
            optimizer.zero_grad()
            run.step()
    recording = read_model(file, Recording)
    assert (recording.first_step, recording.samples_per_step, len(recording.ranks)) == (4, 3, 1)
    assert recording.step_times_s == recording.ranks[0].step_times_s == (1.0,) * 4, "the pause is no part of a step"
    category = MemoryCategory
    states = {
        category.PARAMETERS: 4 * MIB,
        category.GRADIENTS: 4 * MIB,
        category.OPTIMIZER: 8 * MIB + 4,
    }  # Adam counts its steps
    assert recording.ranks[0].states_bytes == states
    assert recording.ranks[0].collectives == ()
    allocated = recording.ranks[0].peak_memory.allocated_bytes
    # in backward: the parameter, its states, the batch, the gradient by sample and its sum
    assert allocated == pytest.approx((4 + 8 + 12 + 12 + 4) * MIB, rel=0.01)


def test_loop_without_a_look_counts_all_steps_and_knows_less(tmp_path: Path) -> None:
    with record(tmp_path / "loop.json", module=Scale(), look=False) as run:
        run.step()
    recording = read_model(tmp_path / "loop.json", Recording)
    assert (recording.first_step, len(recording.step_times_s)) == (1, 1)
    assert recording.ranks[0].collectives is None
    assert recording.ranks[0].peak_memory.allocated_bytes is None


@pytest.mark.parametrize(
    ("num_steps", "rule"),
    [
        (0, "step ... recorded"),
        (1, "1 ... 3 ... 4 ... 23"),
        (NUM_LOOKED_AT, "3 steps recorded, and the first 3 do not count"),
    ],
)
def test_recording_of_too_few_steps_is_refused(num_steps: int, rule: str, tmp_path: Path) -> None:
    file = tmp_path / "loop.json"
    with pytest.raises(RunError) as error, record(file) as run:  # noqa: PT012
        for _ in range(num_steps):
            run.step()
    assert says(str(error.value), f"{file} is not written: ", rule)
    assert not file.exists()


@pytest.mark.parametrize(
    ("file", "arguments", "rule"),
    [
        ("loop.txt", {}, "must end in .json"),
        ("no/loop.json", {}, "is in a folder that does not exist"),
        ("loop.json", {"samples_per_step": 0}, "samples_per_step = 0: must be 1 or more"),
        ("loop.json", {"device": "meta"}, "device = meta: must be cpu or cuda"),
        ("loop.json", {"device": "gpu"}, "device = gpu: must be cpu or cuda"),
    ],
)
def test_recording_that_could_not_be_written_is_refused_at_once(
    file: str, arguments: dict[str, Any], rule: str, tmp_path: Path
) -> None:
    with pytest.raises(SpecError) as error, record(tmp_path / file, **arguments):
        pass
    assert rule in str(error.value)


def test_recording_inside_of_another_is_refused_and_ends_neither(tmp_path: Path) -> None:
    with record(tmp_path / "outer.json") as run:
        rule = f"record = {tmp_path / 'inner.json'}: begins inside of the recording {tmp_path / 'outer.json'}"
        with pytest.raises(SpecError) as error, record(tmp_path / "inner.json"):
            pass
        assert str(error.value).startswith(rule)
        for _ in range(NUM_LOOKED_AT + 1):
            run.step()
    assert (tmp_path / "outer.json").exists()
    with refuses("step()", rule="outside of its recording"):
        run.step()


def test_recording_under_a_profiler_of_the_user_does_not_touch_it(tmp_path: Path) -> None:
    with torch.profiler.profile() as profiler:
        refused = refuses("record", rule="a torch profiler is on already", fix="use look=False")
        with refused, record(tmp_path / "loop.json", module=Scale()):
            pass
        with record(tmp_path / "loop.json", module=Scale(), look=False) as run:
            torch.ones(3).sum()
            run.step()
    assert "aten::sum" in {event.key for event in profiler.key_averages()}


def test_error_in_a_loop_passes_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Neither a file, nor a mode of torch's, nor a recording that the next one would be inside of."""
    for _ in range(2):
        with pytest.raises(ZeroDivisionError), record(tmp_path / "loop.json", module=Scale()) as run:  # noqa: PT012
            for _ in range(NUM_LOOKED_AT - 1):
                run.step()
            raise ZeroDivisionError
    assert not list(tmp_path.iterdir())
    assert torch._C._len_torch_dispatch_stack() == 0
    assert not torch._C._autograd._profiler_enabled()


@pytest.mark.usefixtures("alone")
def test_process_group_that_is_gone_at_the_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RunError, match="leave it before destroy_process_group"), record(tmp_path / "loop.json") as run:  # noqa: PT012
        for _ in range(NUM_LOOKED_AT + 1):
            run.step()
        monkeypatch.setattr(dist, "is_initialized", lambda: False)


@pytest.mark.usefixtures("alone")
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_every_collective_counts_the_buffer_of_its_kind() -> None:
    """Bytes of 4-byte elements: gathered, before they are scattered, or of each rank; twice in a group's other form."""
    tensor, group = torch.ones(6), dist.group.WORLD
    assert group is not None
    with CollectiveLog() as log:
        dist.all_reduce(tensor)
        dist.all_gather_into_tensor(torch.ones(6), tensor)
        dist.all_gather([torch.ones(6)], tensor)
        dist.reduce_scatter_tensor(torch.ones(6), tensor)
        dist.all_to_all_single(torch.ones(6), tensor)
        dist.broadcast(tensor, 0)
        dist.reduce(tensor, 0)
        dist.barrier()
        functional.all_reduce(tensor, "sum", group).sum()
        functional.all_gather_tensor(tensor, 0, group).sum()
        functional.reduce_scatter_tensor(tensor, "sum", 0, group).sum()
    kinds = ["all_reduce", "all_gather", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "reduce"]
    kinds += ["all_reduce", "all_gather", "reduce_scatter"]
    assert log.issued == [RecordedCollective(kind=kind, ranks=(0,), num_bytes=24) for kind in kinds]  # type: ignore[arg-type]


def test_steps_of_a_cuda_loop_are_timed_by_events_without_waiting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By stand-ins: the device's own time between two events, and a wait for the device at the end only."""
    waits: list[int] = []
    now_ms = iter(range(0, 1000, 7))

    class Event:
        def __init__(self, *, enable_timing: bool) -> None:
            assert enable_timing

        def record(self, stream: object) -> None:
            self.ms = next(now_ms)

        def elapsed_time(self, end: Event) -> float:
            assert waits
            return end.ms - self.ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: waits.append(0))
    monkeypatch.setattr("executor.record.loop.forget_peaks", lambda device: None)
    monkeypatch.setattr("executor.record.loop.peak_memory", lambda device: {"reserved_bytes": 5})
    monkeypatch.setattr("executor.record.loop.environment", lambda number, cuda: {"backend": "nccl"} if cuda else {})
    with record(tmp_path / "loop.json", device="cuda:0") as run:
        for _ in range(NUM_LOOKED_AT + 2):
            run.step()
        assert not waits
    recording = read_model(tmp_path / "loop.json", Recording)
    assert recording.step_times_s == pytest.approx((0.007, 0.007))
    assert recording.ranks[0].peak_memory.reserved_bytes == 5
    assert not recording.is_of_cpu


class TrainerOfSteps:
    """Calls events as transformers' Trainer does, by its own handler."""

    def __init__(self, callback: HuggingFaceCallback, num_steps: int) -> None:
        from transformers.trainer_callback import CallbackHandler

        model = nn.Linear(2, 2)
        optimizer = torch.optim.SGD(model.parameters())
        self.handler = CallbackHandler([callback], model, None, optimizer, None)
        self.num_steps = num_steps

    def train(self) -> None:
        device = torch.device("cpu")
        arguments = SimpleNamespace(train_batch_size=4, gradient_accumulation_steps=2, world_size=1, device=device)
        events = ["on_train_begin", *["on_step_begin", "on_step_end"] * self.num_steps, "on_save", "on_evaluate"]
        for event in [*events, "on_step_end", "on_train_end"]:
            self.handler.call_event(event, arguments, SimpleNamespace(), SimpleNamespace())


def test_callback_of_transformers_records_every_update(tmp_path: Path) -> None:
    file = tmp_path / "trainer.json"
    TrainerOfSteps(HuggingFaceCallback(file), num_steps=5).train()
    recording = read_model(file, Recording)
    assert (len(recording.step_times_s), recording.samples_per_step) == (3, 8)
    assert recording.ranks[0].states_bytes[MemoryCategory.PARAMETERS] == 4 * 6


def test_callback_of_transformers_in_its_trainer(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    ids = torch.arange(24)
    data: Any = [{"input_ids": ids, "labels": ids}] * 16
    model = GPT2LMHeadModel(GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=32, n_positions=24))
    arguments = TrainingArguments(
        str(tmp_path), per_device_train_batch_size=2, gradient_accumulation_steps=2, max_steps=6, use_cpu=True,
        save_steps=4, report_to=[], disable_tqdm=True,
    )  # fmt: skip
    Trainer(model, arguments, train_dataset=data, callbacks=[HuggingFaceCallback(tmp_path / "trainer.json")]).train()
    recording = read_model(tmp_path / "trainer.json", Recording)
    assert (len(recording.step_times_s), recording.samples_per_step) == (3, 4)
    num_bytes = 4 * sum(parameter.numel() for parameter in model.parameters())
    states = recording.ranks[0].states_bytes
    assert states[MemoryCategory.PARAMETERS] == states[MemoryCategory.GRADIENTS] == num_bytes
    assert states[MemoryCategory.OPTIMIZER] == 2 * num_bytes + 4 * len(list(model.parameters())), "with Adam's steps"


def test_callback_of_lightning_in_its_trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # which Lightning sets
    lightning = pytest.importorskip("lightning.pytorch")
    from executor.record.lightning import LightningCallback

    class Fit(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 2)

        def training_step(self, batch: list[Tensor], index: int) -> Any:
            return self.layer(batch[0]).sum()

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.ones(32, 4)), batch_size=2)
    callback = LightningCallback(tmp_path / "fit.json", samples_per_step=4)
    trainer = lightning.Trainer(
        max_steps=6, accelerator="cpu", devices=1, accumulate_grad_batches=2, callbacks=[callback], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    trainer.fit(Fit(), loader)
    recording = read_model(tmp_path / "fit.json", Recording)
    assert (len(recording.step_times_s), recording.samples_per_step) == (3, 4)
    assert recording.ranks[0].states_bytes[MemoryCategory.OPTIMIZER] == 2 * 4 * 10 + 2 * 4
