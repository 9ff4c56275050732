"""The page of licences has what is pinned, and what the installed metadata say."""

from email.message import Message
from typing import Any

import pytest

from supply.licences import PAGE, licence, page
from supply.pins import LOCKS, locked


class Package:
    """What `licence` reads of a distribution."""

    def __init__(self, *headers: tuple[str, str]) -> None:
        self.metadata = Message()
        for name, value in (("Name", "some"), *headers):
            self.metadata.add_header(name, value)


def test_the_page_is_up_to_date() -> None:
    """`make licences` writes it. What Ray and the site need is not in this environment:
    tests/deep/ray/test_ray_licences.py.
    """
    assert PAGE.read_text(encoding="utf-8").startswith(page(LOCKS))


def test_the_page_names_every_pin() -> None:
    """Without the metadata, too."""
    rows = [
        row.split(" | ")
        for row in PAGE.read_text(encoding="utf-8").splitlines()
        if row.startswith("| ")
    ]
    named = [(row[0].removeprefix("| "), row[1]) for row in rows if row[0] != "| distribution"]
    assert named == [(pin.name, pin.version) for pin in locked()]


@pytest.mark.parametrize(
    ("headers", "name"),
    [
        ((("License", "old"), ("License-Expression", "MIT AND ISC")), "MIT AND ISC"),
        (
            (("License", "UNKNOWN"), ("Classifier", "License :: OSI Approved :: MIT License")),
            "MIT License",
        ),
        (
            (
                ("License", "MIT"),
                ("Classifier", "License :: OSI Approved :: Apache Software License"),
            ),
            "MIT",
        ),
        (
            (
                ("License", "Copyright\nmany lines"),
                ("Classifier", "License :: OSI Approved :: BSD License"),
            ),
            "BSD License",
        ),
        (
            (("Classifier", "License :: OSI Approved"), ("Classifier", "License :: Public Domain")),
            "Public Domain",
        ),
    ],
)
def test_a_licence_is_what_the_metadata_name(
    headers: tuple[tuple[str, str], ...], name: str
) -> None:
    package: Any = Package(*headers)
    assert licence(package) == name


def test_a_package_without_a_licence_has_to_be_read() -> None:
    package: Any = Package(("Classifier", "License :: OSI Approved"))
    with pytest.raises(ValueError, match="some: its metadata name no licence"):
        licence(package)
