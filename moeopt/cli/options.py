"""Options that several commands share, and what they mean."""

from __future__ import annotations

import functools
import inspect
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from moeopt import engines
from moeopt.core.dtypes import DTYPES
from moeopt.core.shape import MoEShape, check_batch_sizes
from moeopt.errors import InvalidInputError
from moeopt.study_file import StudyFile
from moeopt.tuning.options import TuneRequest

if TYPE_CHECKING:
    from moeopt.models.request import ModelRequest

ENGINES: Final = " or ".join(engines.names())
TARGETS: Final = " or ".join(f"{name}:DIR" for name in engines.names())
_SCHEMES: Final = " or ".join(", ".join(DTYPES).rsplit(", ", 1))
_GIVEN: Final = "engine_given"
GPU_SPEC: Final = "its name, key=value,... or a TOML file of its data sheet"
KERNELS: Final = f"builtin, {', '.join(engines.names())} or auto."

StorageOption = Annotated[
    str | None,
    typer.Option("--storage", help="Study database: a URL or a file. Default: studies/moeopt.db", metavar="URL"),
]
KeyOption = Annotated[
    str | None,
    typer.Option("--key", help="Which result, where the storage holds several: the key that moeopt status prints."),
]
ModeOption = Annotated[
    str | None, typer.Option("--mode", help="split or joint, where the storage holds both for the shape.")
]
BatchSizesOption = Annotated[
    str | None,
    typer.Option("--batch-sizes", help="Batch sizes, such as 1,8,64. Default: the 18 of the published tuners."),
]


@dataclass(frozen=True)
class ShapeOptions:
    """The shape options of a command line, as they were given; :func:`with_groups` makes options of the fields."""

    model: Annotated[
        Path | None, typer.Option("--model", help="A model's directory or config.json: the shape is read from it.")
    ] = None
    engine: Annotated[
        str,
        typer.Option(
            "--engine", help=f"Whose rules give E and N of a model, and if given whose kernel auto takes: {ENGINES}."
        ),
    ] = engines.DEFAULT
    tp: Annotated[int, typer.Option("--tp", help="Tensor-parallel size, with --model.")] = 1
    ep: Annotated[int, typer.Option("--ep", help="Expert-parallel size, with --model.")] = 1
    fuse_shared: Annotated[
        bool | None,
        typer.Option("--fuse-shared/--no-fuse-shared", help="Whether the engine fuses shared experts, with --model."),
    ] = None
    experts: Annotated[int | None, typer.Option("--experts", help="E: experts on this GPU.")] = None
    top_k: Annotated[int | None, typer.Option("--top-k", help="Experts per token.")] = None
    hidden: Annotated[int | None, typer.Option("--hidden", help="K: hidden size.")] = None
    intermediate: Annotated[
        int | None, typer.Option("--intermediate", help="N: expert intermediate size on this GPU (after TP).")
    ] = None
    dtype: Annotated[str | None, typer.Option("--dtype", help=f"{_SCHEMES}.")] = None
    block_shape: Annotated[
        str | None, typer.Option("--block-shape", help="Block of the scales, such as 128,128, or none.", metavar="N,K")
    ] = None
    per_channel: Annotated[bool, typer.Option("--per-channel", help="Scales per output channel and per token.")] = False
    group_size: Annotated[
        int | None, typer.Option("--group-size", help="Weights per scale of a weight-only scheme.")
    ] = None
    engine_given: bool = False

    def given(self) -> bool:
        """Whether any of them was given; an engine alone says nothing of a shape."""
        return replace(self, engine=ShapeOptions.engine, engine_given=False) != ShapeOptions()

    @property
    def rules(self) -> str:
        """The engine whose rules count."""
        return engines.get(self.engine).name

    @property
    def named_engine(self) -> str | None:
        """The engine, where ``--engine`` was given.

        Raises:
            InvalidInputError: There is no such engine.
        """
        return engines.get(self.engine).name if self.engine_given else None

    def for_engine(self, wanted: Collection[str] = ()) -> ShapeOptions:
        """A copy with an engine where none was given: the one that is wanted, else the first that can load the model.

        Args:
            wanted: Engines whose files are to be written.
        """
        if self.engine_given or self.model is None:
            return self
        names = list(dict.fromkeys(wanted)) or engines.names()
        for name in names:
            try:
                request = replace(self, engine=name).request()
                assert request is not None
                request.derive()
            except InvalidInputError:
                continue
            return replace(self, engine=name)
        return replace(self, engine=names[0])

    def request(self) -> ModelRequest | None:
        """The model that was given, with its layout; None where none was."""
        if self.model is None:
            return None
        from moeopt.models.request import ModelRequest

        return ModelRequest(self.model, self.rules, self.tp, self.ep, self.dtype, self.fuse_shared, self._overrides())

    def resolve(self) -> tuple[MoEShape, list[str]]:
        """The shape, and for a model the lines that say which key each number came from.

        Raises:
            InvalidInputError: Too little was given, or it does not fit together.
        """
        request, _ = self.request(), self.rules
        if request is not None:
            shape, derivation = request.derive()
            return shape, list(derivation.lines)
        for option, value in (
            ("--experts", self.experts),
            ("--top-k", self.top_k),
            ("--hidden", self.hidden),
            ("--intermediate", self.intermediate),
        ):
            if value is None:
                raise InvalidInputError(
                    f"{option} is missing: give a study file, --model, or all of --experts, --top-k, --hidden, "
                    "--intermediate and --dtype"
                )
        if self.tp != 1 or self.ep != 1 or self.fuse_shared is not None:
            raise InvalidInputError(
                "--tp, --ep and --fuse-shared go with --model: with --experts and --intermediate give one GPU's sizes"
            )
        return (
            MoEShape(
                num_experts=self.experts or 0,
                top_k=self.top_k or 0,
                hidden_size=self.hidden or 0,
                intermediate_size=self.intermediate or 0,
                dtype=self.dtype or "bf16",
                block_shape=parse_block_shape(self.block_shape) or None,
                per_channel=self.per_channel,
                group_size=self.group_size,
            ),
            [],
        )

    def _overrides(self) -> dict[str, object]:
        values = {
            "num_experts": self.experts,
            "top_k": self.top_k,
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "block_shape": parse_block_shape(self.block_shape),
            "per_channel": self.per_channel or None,
            "group_size": self.group_size,
        }
        return {k: v for k, v in values.items() if v is not None}


NO_SHAPE = ShapeOptions()


def with_groups(command: Callable[..., None], *, without: Collection[str] = ()) -> Callable[..., None]:
    """A command in which each parameter that is a dataclass becomes options, so that no command spells them out.

    Typer reads options from a function's signature: this one has, where such a parameter was, an option for each
    of its fields but those in ``without``.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, tuple[Any, list[str]]] = {}
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if not is_dataclass(kind):
            parameters.append(parameter)
            continue
        hints = inspect.get_annotations(kind, eval_str=True)  # type: ignore[arg-type]  # a type, as annotations are
        mine = [field for field in fields(kind) if field.name not in (*without, _GIVEN)]
        groups[parameter.name] = kind, [field.name for field in mine]
        how = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters += [inspect.Parameter(f.name, how, default=f.default, annotation=hints[f.name]) for f in mine]

    @functools.wraps(command)
    def wrapped(ctx: typer.Context, **values: Any) -> None:
        made = {}
        for name, (kind, names) in groups.items():
            made[name] = kind(**{field: values.pop(field) for field in names})
            source = ctx.get_parameter_source("engine")
            if isinstance(made[name], ShapeOptions) and source is not None and source.name == "COMMANDLINE":
                made[name] = replace(made[name], **{_GIVEN: True})
        command(**made, **values)

    # Set on the function itself: functools.wraps would let inspect and typing look through to the command.
    del wrapped.__wrapped__
    context = inspect.Parameter("ctx", inspect.Parameter.POSITIONAL_OR_KEYWORD, annotation=typer.Context)
    parameters.insert(0, context)
    wrapped.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]  # read by inspect
    wrapped.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": None}
    return wrapped


def read_study(path: Path | None, given: ShapeOptions) -> StudyFile | None:
    """The study file, where one is given: it holds the shape, so that no shape options may be.

    Raises:
        InvalidInputError: Both are given, or the file cannot be used.
    """
    if path is not None and given.given():
        raise InvalidInputError("a study file and shape options were both given: the study file holds the shape")
    return StudyFile.load(path) if path is not None else None


def read_request(file: StudyFile | None, given: ShapeOptions, gpu: str | None) -> tuple[TuneRequest, list[str]]:
    """What is to be tuned, before other options; and how its shape was found, in lines for people.

    Args:
        file: A study file.
        given: Shape options; a recording needs none.
        gpu: The option ``--gpu``.

    Raises:
        InvalidInputError: Too little was given, or it does not fit together.
    """
    if file is not None:
        return file.tune, []
    if not given.given() and (gpu or "").startswith("recorded:"):
        return TuneRequest(), []
    shape, lines = given.resolve()
    return TuneRequest(shape), lines


def parse_block_shape(text: str | None) -> tuple[int, int] | tuple[()] | None:
    """``128,128`` or ``[128, 128]`` as two numbers, ``none`` as an empty tuple.

    Raises:
        InvalidInputError: It is something else.
    """
    if text is None or text.strip().lower() == "none":
        return None if text is None else ()
    match = re.fullmatch(r"\s*\[?\s*(\d+)\s*[,x]\s*(\d+)\s*\]?\s*", text)
    if not match:
        raise InvalidInputError(f"--block-shape is {text!r}: give two sizes such as 128,128")
    return int(match[1]), int(match[2])


def parse_batch_sizes(text: str | None) -> tuple[int, ...] | None:
    """``1,8,64`` as numbers.

    Raises:
        InvalidInputError: It is something else, or one is not positive.
    """
    if text is None:
        return None
    try:
        sizes = [int(part) for part in text.split(",") if part.strip()]
    except ValueError:
        raise InvalidInputError(f"--batch-sizes is {text!r}: give whole numbers such as 1,8,64") from None
    return check_batch_sizes(sizes)
