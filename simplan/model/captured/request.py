"""Request of a capture: functions of the user's code, or a configuration."""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from simplan.base import Count, Line, Natural, Spec
from simplan.errors import Problem, SpecError
from simplan.model.captured.facts import to_tuple


class Reference(Spec):
    """A function of the user's code.

    Attributes:
        module: Name of the Python module, such as ``package.models``.
        function: Name inside of it, such as ``build`` or ``Models.unet``.
    """

    module: Line
    function: Line

    @classmethod
    def of(cls, field: str, text: str) -> Reference:
        """Parses ``module:function``.

        Raises:
            SpecError: The text has another form; ``field`` is its name in the sentence.
        """
        module, colon, function = text.partition(":")
        parts = [*module.split("."), *function.split(".")]
        if not colon or not all(part.isidentifier() for part in parts):
            rule, fix = "must be the name of a module and of a function in it", "write package.module:function"
            raise SpecError(Problem(field=field, value=text, rule=rule, fix=fix))
        return cls(module=module, function=function)

    def __str__(self) -> str:
        return f"{self.module}:{self.function}"


class CaptureRequest(Spec):
    """One capture, of a module that a factory makes, or of an architecture of transformers.

    Attributes:
        factory: Function without arguments, or class, that gives the module.
        batch: Function of a number of samples that gives the arguments of forward, as a tuple or a dictionary.
        config: Path of a ``config.json`` of Hugging Face, in place of both.
        seq_len: Tokens of a sample of such a model.
        images: Images of a sample of such a model; None for one if all have one size, and else none.
        image_size: Height and width of each, in pixels; None for those of the tower.
        loss: Function of what forward returns; None for its own loss, or the sum of its tensors.
        tensor_parallel: Degrees above 1 for which the part of one rank is captured as well.
        tp_plan: Function of the plan by which ranks split the module; None for the plan that transformers has for it.
        name: Name of the model; empty for that of the class.
        folder: Folder from which the functions are imported.
    """

    factory: Reference | None = None
    batch: Reference | None = None
    config: Line = ""
    seq_len: Count = 1
    images: Annotated[Natural, Field(le=1_000)] | None = None
    image_size: tuple[Count, Count] | None = None
    loss: Reference | None = None
    tensor_parallel: Annotated[tuple[Count, ...], BeforeValidator(to_tuple)] = ()
    tp_plan: Reference | None = None
    name: Line = ""
    folder: Line
