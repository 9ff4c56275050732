"""Edit the product in small ways, and see whether the unit tests of each edit's area find it.

python -m mutants                   the sample: an error if mutants/survivors.toml lacks a survivor
python -m mutants --count 20        fewer of it
python -m mutants NAME ...          all edits with one of these in their file, function or text
"""

import argparse
import random
import sys
import time
import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from itertools import chain
from pathlib import Path

from mutants.edits import Edit, edits_of
from mutants.runs import Run, preload, run

AREAS = ("policy", "predict", "scheduling", "controller", "memory", "migration", "weights")
"""Rooms whose tests start no server; those that import vLLM are the last."""
COUNT = 150
SEED = 20261128
LEAST_KILLED = 0.9
SURVIVORS = Path(__file__).with_name("survivors.toml")


def main() -> None:
    """Exits with 1 on an unlisted survivor, too few killed, or a line of the list that is wrong."""
    parser = argparse.ArgumentParser(
        "python -m mutants",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--count", type=int, default=COUNT)
    arguments = parser.parse_args()
    edits = all_edits()
    chosen = sample(edits, arguments.count)
    if arguments.names:
        chosen = [edit for edit in edits if any(name in edit.name for name in arguments.names)]
    found = judge(chosen)
    lines, is_right = report(found, listed(SURVIVORS), whole=chosen == sample(edits, COUNT))
    print("\n".join(lines))
    sys.exit(0 if is_right else 1)


def area_of(edit: Edit) -> str:
    """Return the room of an edit."""
    return Path(edit.path).parts[1]


def all_edits() -> list[Edit]:
    """Return the edits of all areas."""
    paths = [path for area in AREAS for path in sorted(Path("flying_serving", area).rglob("*.py"))]
    return [edit for path in paths for edit in edits_of(path.as_posix(), path.read_bytes())]


def sample(edits: Iterable[Edit], count: int) -> list[Edit]:
    """Draw some edits. Which of them come does not depend on the others, so that a change of the
    product changes the sample where it is.
    """
    return sorted(edits, key=lambda edit: random.Random(f"{SEED} {edit.name}").random())[:count]


def files_for(edit: Edit) -> tuple[list[str], list[str]]:
    """Return the files of tests of an edit's module, and the others of its area."""
    own, area = f"test_{Path(edit.path).stem}_", area_of(edit)
    files = sorted(Path("tests").glob(f"**/{area}/**/test_*.py"))
    first, others = (
        [path.as_posix() for path in files if f"{path.stem}_".startswith(own) == is_own]
        for is_own in (True, False)
    )
    return first, others


def judge(edits: Sequence[Edit]) -> dict[Edit, Run]:
    """Run the tests of each edit. Raises SystemExit if they fail without one."""
    by_area: defaultdict[str, list[Edit]] = defaultdict(list)
    for edit in edits:
        by_area[area_of(edit)].append(edit)
    found: dict[Edit, Run] = {}
    for area in sorted(by_area, key=AREAS.index):
        unedited = run(list(chain(*files_for(by_area[area][0]))))
        if unedited.verdict != "survived":
            raise SystemExit(f"{area}: {unedited.by} fails without an edit")
        preload(unedited.imported)
        for edit in sorted(by_area[area], key=lambda edit: (edit.path, edit.start)):
            began_s = time.monotonic()
            for files in filter(None, files_for(edit)):
                result = found[edit] = run(files, edit, unedited)
                if result.verdict != "survived":
                    break
            took_s = time.monotonic() - began_s
            print(f"{result.verdict:9}{took_s:6.1f} s  {edit.name}  {result.by}", flush=True)
    return found


def listed(path: Path) -> dict[str, str]:
    """Return why edits survive, by their names."""
    return dict(tomllib.loads(path.read_text(encoding="utf-8")))


def report(
    found: dict[Edit, Run], reasons: dict[str, str], *, whole: bool
) -> tuple[list[str], bool]:
    """Return the figures by area and what is wrong, and whether nothing is. `whole`: all of the
    sample was tried.
    """
    survivors = [edit for edit, result in found.items() if result.verdict == "survived"]
    tried, survived = Counter(map(area_of, found)), Counter(map(area_of, survivors))
    lines = [
        f"{area:12} {count - survived[area]:3} of {count:3} killed" for area, count in tried.items()
    ]
    killed = len(found) - len(survivors)
    lines.append(f"{'all':12} {killed:3} of {len(found):3} killed")
    wrong = [
        f"survived: {edit.path}:{edit.line}: {edit.name}"
        for edit in survivors
        if edit.name not in reasons
    ]
    if whole:
        names = {edit.name for edit in survivors}
        wrong += [f"listed, and no survivor: {name}" for name in reasons if name not in names]
        if killed < LEAST_KILLED * len(found):
            wrong.append(f"less than {LEAST_KILLED:.0%} are killed")
    return [*lines, *wrong], not wrong


if __name__ == "__main__":
    main()
