"""The one field of the metadata that pyproject.toml cannot give to every supported setuptools release."""

from setuptools import setup

setup(license="BSD-3-Clause")
