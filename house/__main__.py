"""Print the size of the house.

python -m house             statements, features, walks as they were recorded, biggest classes
python -m house --record    record the walks again on live servers, keep and print them: minutes
"""

import argparse

from house import report
from house.walks import save


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="python -m house",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--record", action="store_true", help="record the walks again")
    if parser.parse_args().record:
        from house.recording import record  # its servers take seconds to import

        save(record())
    print("\n".join(report.report()))


if __name__ == "__main__":
    main()
