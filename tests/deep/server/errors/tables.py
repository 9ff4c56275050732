"""The tables of docs/errors.md.

The document has exactly these rows: `python -m tests.deep.server.errors.tables` prints them.
"""

import sys

from tests.deep.server.errors.case import Case
from tests.deep.server.errors.command_cases import COMMAND_CASES
from tests.deep.server.errors.feature_cases import FEATURE_CASES
from tests.deep.server.errors.http_cases import (
    BODY_CASES,
    LAYOUT_CASES,
    REQUEST_CASES,
    RIGHTS_CASES,
    ROUTE_CASES,
)
from tests.deep.server.errors.start_cases import FLAG_CASES, FRONT_END_CASES

TABLES: dict[str, tuple[Case, ...]] = {
    "flags": tuple(case for _, case in FLAG_CASES),
    "front ends": tuple(case for _, case in FRONT_END_CASES),
    "features": tuple(case for _, case in FEATURE_CASES),
    "requests": REQUEST_CASES,
    "rights": RIGHTS_CASES,
    "bodies": BODY_CASES,
    "layouts": LAYOUT_CASES,
    "routes": ROUTE_CASES,
    "commands": COMMAND_CASES,
}


if __name__ == "__main__":
    for name, cases in TABLES.items():
        sys.stdout.write(f"\n{name}\n" + "".join(f"{case.row}\n" for case in cases))
