"""The shape of every command's JSON, as JSON schemas, and a validator for the part they use."""

from typing import Any

TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}


def problems(schema: dict[str, Any], value: Any, where: str = "$") -> list[str]:
    """List where `value` breaks `schema`; properties that it does not name are forbidden."""
    if "anyOf" in schema:
        found = [problems(option, value, where) for option in schema["anyOf"]]
        return [] if [] in found else min(found, key=len)
    if "enum" in schema and value not in schema["enum"]:
        return [f"{where}: {value!r} is none of {schema['enum']}"]
    kinds = schema.get("type", list(TYPES))
    kinds = [kinds] if isinstance(kinds, str) else kinds
    fits = [k for k in kinds if isinstance(value, TYPES[k])]
    if isinstance(value, bool):
        fits = [k for k in fits if k == "boolean"]
    if not fits:
        return [f"{where}: {value!r} is no {' or '.join(kinds)}"]
    if isinstance(value, dict):
        return _object(schema, value, where)
    if isinstance(value, list):
        items = schema.get("items", {})
        return [
            x
            for place, entry in enumerate(value)
            for x in problems(items, entry, f"{where}[{place}]")
        ]
    if "minimum" in schema and isinstance(value, int | float) and value < schema["minimum"]:
        return [f"{where}: {value} is below {schema['minimum']}"]
    return []


def _object(schema: dict[str, Any], value: dict[str, Any], where: str) -> list[str]:
    known = schema.get("properties", {})
    # A schema that says nothing about properties allows them all.
    other = schema.get("additionalProperties", None if "properties" in schema else {})
    found = [
        f"{where}: {name} is missing" for name in schema.get("required", known) if name not in value
    ]
    for name, entry in value.items():
        if name in known:
            found += problems(known[name], entry, f"{where}.{name}")
        elif other is not None:
            found += problems(other, entry, f"{where}.{name}")
        else:
            found.append(f"{where}: {name} is unexpected")
    return found


def record(**properties: Any) -> dict[str, Any]:
    """Return the schema of an object with exactly these properties."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def document(command: str, **properties: Any) -> dict[str, Any]:
    """Return the schema of a command's document."""
    head = {"command": {"enum": [command]}, "version": TEXT, "ok": {"type": "boolean"}}
    return record(**head, **properties)


def array(items: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a list."""
    return {"type": "array", "items": items}


def table(values: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object with any names."""
    return {"type": "object", "additionalProperties": values}


ANY: dict[str, Any] = {}
TEXT = {"type": "string"}
COUNT = {"type": "integer", "minimum": 0}
# NaN and infinities have no number in JSON.
NUMBER = {"anyOf": [{"type": "number"}, {"enum": ["nan", "inf", "-inf"]}]}
POSITIVE = {"type": "number", "minimum": 0}
MAYBE_POSITIVE = {"anyOf": [{"type": "null"}, POSITIVE]}
MAYBE_NUMBER = {"anyOf": [{"type": "null"}, NUMBER]}
MAYBE_COUNT = {"anyOf": [{"type": "null"}, COUNT]}

ROW = record(
    way=TEXT,
    dtype={"enum": ["float32", "float64", "bfloat16", "float16"]},
    error=MAYBE_NUMBER,
    state_error=MAYBE_NUMBER,
    diverges_at=MAYBE_COUNT,
    tolerance=NUMBER,
    note=TEXT,
    ok={"type": "boolean"},
)
MATRIX = {"batch": COUNT, "length": COUNT, "rows": array(ROW)}
SPEECH = {
    "text": TEXT,
    "ids": array(COUNT),
    "finish_reason": {"enum": ["stop", "length", "interrupt"]},
    "prompt_tokens": COUNT,
    "prompt_seconds": POSITIVE,
    "seconds": POSITIVE,
    "tokens_per_second": MAYBE_POSITIVE,
}
FIGURE = record(name=TEXT, seconds=POSITIVE, intermediates=COUNT, inputs=COUNT)
COUNTS = {"parameters": COUNT, "bytes": COUNT, "state_bytes": COUNT, "flops": COUNT}
PART = record(name=TEXT, kind=TEXT, **COUNTS, passes=COUNT)
ACTIVATION = record(
    perplexity=table(NUMBER), best=TEXT, is_decisive={"type": "boolean"}, configured=TEXT
)
WHERE = {"branch": TEXT, "turns": COUNT, "position": COUNT}

RUN = {
    "finished": {"type": "boolean"},
    "step": COUNT,
    "tokens": COUNT,
    "seconds": POSITIVE,
    "skipped": COUNT,
    "bits_per_byte": MAYBE_NUMBER,
    "out": TEXT,
}
COMPARISON = {
    "model": NUMBER,
    "ngram": NUMBER,
    "order": COUNT,
    "seen_bytes": COUNT,
    "held_out_bytes": COUNT,
    "held_out_files": COUNT,
}
TOUR = record(operators=table(table(MAYBE_NUMBER)), core=array(FIGURE), scan=array(FIGURE))

SCHEMAS = {
    "demo": document(
        "demo",
        training=record(**RUN),
        verify=record(ok={"type": "boolean"}, **MATRIX),
        text=TEXT,
        resumed_equals_whole={"type": "boolean"},
        comparison=record(**COMPARISON),
        tour={"anyOf": [{"type": "null"}, TOUR]},
    ),
    "train": {
        "anyOf": [
            document("train", **RUN),
            document("train", recipe=TEXT, owners=array(TEXT)),
        ]
    },
    "compare": document("compare", run=TEXT, **COMPARISON),
    "generate": document(
        "generate",
        model=TEXT,
        prompt=TEXT,
        **SPEECH,
        bytes_per_token=COUNT,
        share_of_limit=MAYBE_POSITIVE,
    ),
    "chat": {
        "anyOf": [
            document("chat", event={"enum": ["answer"]}, **WHERE, **SPEECH),
            document(
                "chat",
                event={"enum": ["save", "load", "fork", "switch", "undo", "help"]},
                **WHERE,
            ),
            document("chat", event={"enum": ["error"]}, error=record(type=TEXT, message=TEXT)),
        ]
    },
    "verify": document("verify", model=TEXT, **MATRIX),
    "inspect": document(
        "inspect",
        model=TEXT,
        config=table(ANY),
        count=record(**COUNTS, length=COUNT, parts=array(PART)),
        seconds=table(POSITIVE),
        timed_tokens=COUNT,
        activation={"anyOf": [{"type": "null"}, ACTIVATION]},
    ),
    "convert": document(
        "convert",
        source=TEXT,
        target=TEXT,
        layout={"enum": ["official", "transformers"]},
        format={"enum": ["safetensors", "bin"]},
        quantize={"anyOf": [{"type": "null"}, {"enum": ["int8", "int4"]}]},
        files=array(record(name=TEXT, bytes=COUNT)),
    ),
    "doctor": document(
        "doctor",
        versions=table({"type": ["string", "null"]}),
        devices=array(record(device=TEXT, count=COUNT, note=TEXT)),
        kernels=record(
            variant={"type": ["string", "null"]},
            available=array(TEXT),
            threading={"type": ["string", "null"]},
            why_not={"type": ["string", "null"]},
        ),
        operators=array(
            record(
                operator=TEXT,
                family=TEXT,
                auto={"enum": ["native", "portable", "reference"]},
                refused=table(TEXT),
                error=NUMBER,
                ok={"type": "boolean"},
            )
        ),
    ),
}


def failure(command: str) -> dict[str, Any]:
    """Return the schema of a command that ended with an error."""
    return document(command, error=record(type=TEXT, message=TEXT))
