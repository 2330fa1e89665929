"""Callback for the Trainer of Hugging Face transformers that records its steps."""

from __future__ import annotations

import os
from typing import Any

from transformers import TrainerCallback

from executor.record.loop import LoopRecorder


class HuggingFaceCallback(TrainerCallback):  # type: ignore[misc]
    """Records every update of a training: ``Trainer(..., callbacks=[HuggingFaceCallback("measurement.json")])``.

    Time of evaluations and checkpoints is left out.

    Args:
        file, look: See ``executor.record.record``.
        samples_per_step: Samples of all ranks between two updates; None for those of the arguments, as if all ranks
            were data parallel.
    """

    def __init__(self, file: str | os.PathLike[str], *, samples_per_step: int | None = None, look: bool = True) -> None:
        self._file, self._samples_per_step, self._look = file, samples_per_step, look
        self._recorder: LoopRecorder | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Begins the recording, with the Trainer's model and optimizer."""
        if self._recorder is not None:  # of a training that an exception ended
            self._recorder.cancel()
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        self._recorder = LoopRecorder(
            self._file,
            samples_per_step=self._samples_per_step or samples,
            module=objects.get("model"),
            optimizer=objects.get("optimizer"),
            device=args.device,
            look=self._look,
        )
        self._recorder.start()

    def on_step_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Ends a step, after the update."""
        if self._recorder is not None:
            self._recorder.step()

    def on_evaluate(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Leaves out the time of an evaluation."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def on_save(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Leaves out the time of a checkpoint."""
        if self._recorder is not None:
            self._recorder.begin_step()

    def on_train_end(self, args: Any, state: Any, control: Any, **objects: Any) -> None:
        """Writes the file on rank 0."""
        if self._recorder is not None:
            recorder, self._recorder = self._recorder, None
            recorder.finish()
