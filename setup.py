"""What pyproject.toml cannot say: the page of the package index is the README with other links."""

from __future__ import annotations

import runpy

from setuptools import setup

setup(
    long_description=runpy.run_path("scripts/package_page.py")["describe"](),
    long_description_content_type="text/markdown",
)
