"""A table's contract: one YAML file says each column's type, role, checks and preprocessing.

Four views come from the one source: Spark's StructType, an Arrow schema, petastorm's Unischema and
the inputs of a Keras model.
"""

from __future__ import annotations

import datetime
import difflib
import math
import os
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import pyarrow as pa
import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, field_validator, model_validator
from pydantic import Field as PydanticField

from dl_on_spark.errors import SchemaError
from dl_on_spark.lake import ddl, nested
from dl_on_spark.lake.preprocess_spec import Preprocess, checked
from dl_on_spark.lake.tensor_columns import TENSOR_CODECS, TENSOR_DTYPES, TensorColumn, difference
from dl_on_spark.yaml_text import load_yaml

if TYPE_CHECKING:
    import keras
    from pyspark.sql.types import StructType

Role = Literal["feature", "label", "weight", "key", "partition"]
Codec = Literal["ndarray", "compressed_ndarray", "png", "jpeg", "scalar"]
_DEFAULT_OOV = 1
_DTYPES = {*TENSOR_DTYPES, "string"}


class Checks(BaseModel):
    """What each value of a field must satisfy; a null passes all but ``not_null``.

    ``fraction``: least share of rows that must pass this field's checks, else the ETL fails.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    min: float | str | None = None
    max: float | str | None = None
    one_of: tuple[Any, ...] | None = PydanticField(default=None, alias="in")
    regex: str | None = None
    unique: bool = False
    not_null: bool = False
    fraction: float | None = PydanticField(default=None, ge=0, le=1)

    @field_validator("min", "max", "one_of", mode="before")
    @classmethod
    def _dates_as_text(cls, value: Any) -> Any:
        """YAML reads 2013-06-01 as a date; a schema keeps its text, as YAML would write it again."""
        if isinstance(value, (list, tuple)):
            return tuple(cls._dates_as_text(item) for item in value)
        return value.isoformat() if isinstance(value, datetime.date) else value


class Field(BaseModel):
    """One column. ``type`` is Spark DDL, or ``vector`` for Spark ML's; ``shape`` and ``dtype`` describe the tensor
    of one row, ``codec`` how it is stored in a binary column. ``pad``: the value that fills lists and encoded tensors
    up which are smaller than ``shape``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = PydanticField(min_length=1)
    type: str
    nullable: bool = True
    role: Role | None = None
    shape: tuple[int, ...] | None = None
    dtype: str | None = None
    pad: Any = None
    codec: Codec | None = None
    nulls: Literal["refuse", "indicator"] | dict[Literal["fill"], Any] = "refuse"
    checks: Checks = Checks()
    preprocess: Preprocess | None = None

    @field_validator("type")
    @classmethod
    def _known_type(cls, value: str) -> str:
        try:
            ddl.arrow_type(value)
        except SchemaError as error:
            raise ValueError(str(error)) from error
        return value

    @field_validator("shape")
    @classmethod
    def _sizes(cls, value: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if value is not None and min(value, default=1) < 1:
            raise ValueError(f"a size of {min(value)}; the rows are not part of a shape")
        return value

    @field_validator("dtype")
    @classmethod
    def _known_dtype(cls, value: str | None) -> str | None:
        if value is not None and value not in _DTYPES:
            raise ValueError(f"{value!r} is none; known: {', '.join(sorted(_DTYPES))}")
        return value

    @field_validator("preprocess")
    @classmethod
    def _known_preprocess(cls, value: Preprocess | None) -> Preprocess | None:
        return checked(value)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        kind, element = self.arrow_type, ddl.element_type(self.arrow_type)
        if self.codec in TENSOR_CODECS:
            element = self._tensor_element()
        if self.step is not None and ddl.is_vector(kind):
            raise ValueError("a vector is fed as it is; preprocess it with Spark ML's stages")
        padded_list = pa.types.is_list(self.arrow_type) and len(self.shape or ()) == 1
        if self.pad is not None and not (padded_list or (self.codec in TENSOR_CODECS and self.shape)):
            raise ValueError("pad needs a list and a shape of one number, or a codec and a shape")
        text, scalar_text = pa.types.is_string(element), pa.types.is_string(kind)
        number = not any(is_(element) for is_ in (pa.types.is_string, pa.types.is_binary, pa.types.is_nested))
        if self.step in {"standardize", "bucketize"} and not number:
            raise ValueError(f"preprocess {self.step} needs numbers, not {self.type}")
        if self.step == "vocabulary" and not (number or text):
            raise ValueError(f"preprocess vocabulary needs numbers or text, not {self.type}")
        if self.checks.regex is not None and not scalar_text:
            raise ValueError(f"checks.regex needs text, not {self.type}")
        if self.dtype is not None and self.codec is None and number == (self.dtype == "string"):
            raise ValueError(f"dtype {self.dtype} is none that {self.type} can be fed as")
        if self.role == "weight" and (not number or self.shape):
            raise ValueError(f"a weight is one number a row, not {self.type}")
        if isinstance(self.nulls, dict) and not _fills(self.nulls.get("fill"), element):
            raise ValueError(f"nulls.fill: {_shown(self.nulls.get('fill'))} is no value of type {self.type}")
        self._check_checks(kind)
        return self

    def _check_checks(self, kind: pa.DataType) -> None:
        low, high, allowed = self.checks.min, self.checks.max, self.checks.one_of
        given = [(name, value) for name, value in (("min", low), ("max", high)) if value is not None]
        for name, value in (*given, *(("in", value) for value in allowed or ())):
            if not _comparable(value, kind):
                raise ValueError(f"checks.{name}: {_shown(value)} is no value of type {self.type}")
        nothing = allowed is not None and not allowed
        if nothing or (isinstance(low, float) and isinstance(high, float) and low > high):
            raise ValueError("checks: no value passes (in: [], or min above max)")

    def _tensor_element(self) -> pa.DataType:
        """What an encoded tensor holds. Raises `ValueError` for entries that fit no codec."""
        if not pa.types.is_binary(self.arrow_type):
            raise ValueError(f"codec {self.codec} needs type: binary, not {self.type}")
        if self.step is not None:
            raise ValueError("an encoded tensor is fed as it is; preprocess it in the model")
        dtype = self.tensor_spec()[1]
        if dtype not in TENSOR_DTYPES:
            raise ValueError(f"codec {self.codec} has no tensors of dtype {dtype!r}")
        element = pa.from_numpy_dtype(dtype)
        if self.pad is not None and not _fills(self.pad, element):
            raise ValueError(f"pad: {_shown(self.pad)} is no value of dtype {dtype}")
        return element

    @cached_property
    def arrow_type(self) -> pa.DataType:
        """The column's Arrow type."""
        return ddl.arrow_type(self.type)

    @property
    def step(self) -> str | None:
        """Name of the preprocessing step."""
        return (
            self.preprocess
            if self.preprocess is None or isinstance(self.preprocess, str)
            else next(iter(self.preprocess))
        )

    @property
    def options(self) -> dict[str, Any]:
        """Options of the preprocessing step."""
        return (
            {} if self.preprocess is None or isinstance(self.preprocess, str) else next(iter(self.preprocess.values()))
        )

    @property
    def cardinality(self) -> int:
        """How many different integers the preprocessed column may hold, for an embedding's first size.

        A vocabulary's first ``oov`` indices are the unknown values.
        """
        if self.step == "vocabulary":
            return int(self.options["max"]) + int(self.options.get("oov", _DEFAULT_OOV))
        if self.step == "hash":
            return int(self.options["buckets"])
        if self.step == "bucketize":
            bounds = self.options.get("boundaries")
            return (int(self.options["quantiles"]) - 1 if bounds is None else len(bounds)) + 1
        raise SchemaError(
            f"field {self.name!r} has no fixed set of integers.",
            fix="Give it preprocess: vocabulary, hash or bucketize.",
        )

    def tensor_spec(self) -> tuple[tuple[int, ...], str]:
        """(shape of one row, dtype name) after preprocessing; text and bytes have the dtype "string"."""
        shape = self.shape or ()
        if self.step == "standardize":
            return shape, "float32"
        if self.step is not None:
            return shape, "int32"
        if self.dtype is not None:
            return shape, self.dtype
        if self.codec in TENSOR_CODECS:
            return shape, "uint8" if self.codec in {"png", "jpeg"} else "float32"
        return shape, _dtype(self.arrow_type)


_ENTRIES = ", ".join(name for name in Field.model_fields if name != "name")


class Schema:
    """The fields of one table, in order."""

    def __init__(self, name: str, fields: Iterable[Field], source: str = "the schema") -> None:
        self.name = name
        self.fields = tuple(fields)
        self.source = source
        self._by_name = {field.name: field for field in self.fields}
        for field in self.fields:
            if field.nulls == "indicator" and f"{field.name}_is_null" in self._by_name:
                raise SchemaError(
                    f"{source}: field '{field.name}_is_null' has the name of the indicator of {field.name!r}.",
                    fix="Rename that column, or give the other one nulls: {fill: VALUE}.",
                )
        weights = [field.name for field in self.with_role("weight")]
        if len(weights) > 1:
            raise SchemaError(f"{source}: the weights {', '.join(weights)}.", fix="Give one field `role: weight`.")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Schema:
        """Read a schema file. Raises `SchemaError` naming file, field and what is wrong with it."""
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise SchemaError(f"{path}: cannot be read ({error}).", fix="Check the path of the schema.") from error
        return cls.from_yaml(text, str(path))

    @classmethod
    def from_yaml(cls, text: str, source: str = "the schema") -> Schema:
        """The schema in YAML text; `source` is named in errors."""
        try:
            data = load_yaml(text)
        except yaml.YAMLError as error:
            raise SchemaError(f"{source}: not valid YAML: {error}", fix="Mend the line named above.") from error
        return cls.from_dict(data, source)

    @classmethod
    def from_dict(cls, data: Any, source: str = "the schema") -> Schema:
        """The schema of a mapping ``{"name": …, "fields": {column: {…}}}``."""
        if not isinstance(data, dict) or not isinstance(data.get("fields"), dict) or not data["fields"]:
            raise SchemaError(f"{source}: needs `name` and `fields`.", fix="See schemas/flight_features.yaml.")
        unknown = set(data) - {"name", "fields"}
        if unknown:
            raise SchemaError(f"{source}: unknown entry {sorted(unknown)[0]!r}.", fix="Known: name, fields.")
        fields = [_field(name, spec, source) for name, spec in data["fields"].items()]
        return cls(str(data.get("name", "")), fields, source)

    def to_dict(self) -> dict[str, Any]:
        """The mapping that `from_dict` reads."""
        fields = {}
        for field in self.fields:
            spec = field.model_dump(mode="json", by_alias=True, exclude_defaults=True)
            fields[spec.pop("name")] = spec
        return {"name": self.name, "fields": fields}

    def to_yaml(self) -> str:
        """The text that `from_yaml` reads."""
        return str(yaml.safe_dump(self.to_dict(), sort_keys=False))

    def __getitem__(self, name: str) -> Field:
        if name not in self._by_name:
            near = difflib.get_close_matches(name, self._by_name, n=1)
            raise SchemaError(
                f"{self.source} has no field {name!r}.",
                fix=f"Did you mean {near[0]!r}?" if near else f"Fields: {', '.join(self._by_name)}.",
            )
        return self._by_name[name]

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Schema) and (self.name, self.fields) == (other.name, other.fields)

    def __hash__(self) -> int:
        return hash((self.name, tuple(field.name for field in self.fields)))

    def with_role(self, role: Role) -> tuple[Field, ...]:
        """The fields of one role."""
        return tuple(field for field in self.fields if field.role == role)

    @property
    def features(self) -> tuple[Field, ...]:
        """What the model sees."""
        return self.with_role("feature")

    @property
    def labels(self) -> tuple[Field, ...]:
        """What it learns to predict."""
        return self.with_role("label")

    @property
    def weight(self) -> Field | None:
        """The sample weight, if there is one."""
        return next(iter(self.with_role("weight")), None)

    @property
    def keys(self) -> tuple[Field, ...]:
        """What identifies a row."""
        return self.with_role("key")

    @property
    def partitions(self) -> tuple[Field, ...]:
        """Columns that name folders."""
        return self.with_role("partition")

    @property
    def feed_columns(self) -> list[str]:
        """Columns that training reads: features, labels, weight."""
        weight = [] if self.weight is None else [self.weight]
        return [field.name for field in (*self.features, *self.labels, *weight)]

    def check(self, have: pa.Schema, uri: str, columns: Iterable[str] | None = None) -> None:
        """Raise `SchemaError` unless `have` holds `columns` (default: all fields) with types that fit."""
        for name in [field.name for field in self.fields] if columns is None else columns:
            field = self[name]
            found = nested.field_of(have, name)
            if found is None:
                near = difflib.get_close_matches(name, nested.names_of(have), n=1)
                raise SchemaError(
                    f"{uri} has no column {name!r}, which {self.source} asks for.",
                    fix=(f"Did you mean {near[0]!r}? " if near else "")
                    + f"Columns of the table: {', '.join(have.names)}.",
                )
            kind = found.type
            if not ddl.fits(kind, field.arrow_type):
                raise SchemaError(
                    f"{uri}: column {name!r} has type {kind}; {self.source} asks for {field.type}.",
                    fix="Correct `type` in the schema, or write the column with that type.",
                )
            if field.codec not in TENSOR_CODECS:
                continue
            shape, dtype = field.tensor_spec()
            asked = difference(found, field.codec, dtype, shape, padded=field.pad is not None)
            if asked is not None:
                raise SchemaError(
                    f"{uri}: column {name!r} holds {TensorColumn.of(found)}; {self.source} asks for {asked}.",
                    fix="Correct codec, dtype and shape in the schema (`dl-on-spark table inspect` shows them).",
                )

    def to_arrow(self) -> pa.Schema:
        """Arrow schema of all fields."""
        return pa.schema([pa.field(f.name, f.arrow_type, nullable=f.nullable) for f in self.fields])

    def to_spark(self) -> StructType:
        """Spark's StructType of all fields."""
        from pyspark.ml.linalg import VectorUDT
        from pyspark.sql.pandas.types import from_arrow_type
        from pyspark.sql.types import DataType, StructField, StructType

        def spark_type(kind: pa.DataType) -> DataType:
            return VectorUDT() if kind == ddl.VECTOR else from_arrow_type(kind)

        return StructType([StructField(f.name, spark_type(f.arrow_type), f.nullable) for f in self.fields])

    def to_unischema(self) -> Any:
        """petastorm's Unischema of all fields (extra ``petastorm``)."""
        from dl_on_spark.lake.petastorm_view import unischema_of

        return unischema_of(self)

    def keras_inputs(self) -> dict[str, keras.KerasTensor]:
        """A ``keras.Input`` for each feature, by name, after preprocessing."""
        from dl_on_spark.lake.keras_view import inputs_of

        return inputs_of(self)


def _field(name: object, spec: Any, source: str) -> Field:
    if name is None or isinstance(name, bool):  # YAML's own words: null, on, off, yes, no
        raise SchemaError(f"{source}: YAML reads a field's name as {name!r}.", fix="Quote the name.")
    if not isinstance(spec, dict):
        raise SchemaError(f"{source}: field {name!r} needs entries such as `type`.", fix="{type: int, role: feature}")
    odd = [key for key in spec if not isinstance(key, str)]
    if odd:  # YAML's own words: null, yes, 1
        raise SchemaError(f"{source}: field {name!r}: {odd[0]!r} is no entry's name.", fix=f"Known: {_ENTRIES}.")
    try:
        return Field(name=str(name), **spec)
    except (ValidationError, TypeError) as error:
        raise SchemaError(f"{source}: field {name!r}: {_explain(error)}.", fix="Mend that entry.") from error


def _explain(error: ValidationError | TypeError) -> str:
    if isinstance(error, TypeError):
        return str(error)
    findings = []
    for item in error.errors():
        place = ".".join(str(part) for part in item["loc"] if not str(part).startswith(("literal[", "dict[")))
        text = item["msg"].removeprefix("Value error, ").rstrip(".")
        if item["type"] == "extra_forbidden":
            known = Checks.model_fields if "checks" in item["loc"] else Field.model_fields
            names = [field.alias or key for key, field in known.items() if key != "name"]
            near = difflib.get_close_matches(str(item["loc"][-1]), names, n=1)
            text = f"unknown entry; did you mean {near[0]!r}" if near else f"unknown; known: {', '.join(names)}"
        findings.append(f"{place}: {text}" if place else text)
    return "; ".join(findings)


def _shown(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else repr(value)


def _fills(value: Any, kind: pa.DataType) -> bool:
    """Whether a null of this type, or of a list's elements, can become `value`."""
    kind = ddl.element_type(kind)
    try:
        found = ddl.scalar(value, kind).as_py()
        if isinstance(found, float) and not math.isfinite(found):
            return False
        # Arrow would cut the fraction of a number off.
        return found is not None and (found == value or not pa.types.is_integer(kind))
    except (pa.ArrowException, ValueError, TypeError, ArithmeticError):
        return False


def _comparable(value: Any, kind: pa.DataType) -> bool:
    """Whether a check's value can be compared with a column of this type."""
    if pa.types.is_boolean(kind):
        return isinstance(value, bool)
    if pa.types.is_date(kind) or pa.types.is_timestamp(kind):
        try:
            return isinstance(value, str) and datetime.datetime.fromisoformat(value) is not None
        except ValueError:
            return False
    if pa.types.is_string(kind):
        return isinstance(value, str)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and not pa.types.is_nested(kind)
    return number and math.isfinite(value)


def _dtype(kind: pa.DataType) -> str:
    kind = ddl.element_type(kind)
    if pa.types.is_decimal(kind):
        return "float64"
    if pa.types.is_date(kind):
        return "int32"
    if pa.types.is_timestamp(kind):
        return "int64"
    if pa.types.is_string(kind) or pa.types.is_binary(kind):
        return "string"
    if pa.types.is_struct(kind):
        raise SchemaError("a struct is not a tensor.", fix="Name its fields by dots: `place.x`.")
    return str(kind.to_pandas_dtype().__name__).rstrip("_")
