"""The JSON Schemas that every document is validated against."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema

FOLDER = Path(__file__).parents[1] / "schemas"


@cache
def schema(name: str) -> Any:
    document = json.loads((FOLDER / f"{name}.schema.json").read_text())
    jsonschema.Draft202012Validator.check_schema(document)
    return document


def validate(document: Any, name: str) -> Any:
    """Return the document if it matches the schema ``name``."""
    jsonschema.validate(document, schema(name), jsonschema.Draft202012Validator)
    return document
