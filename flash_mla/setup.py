"""What pyproject.toml cannot say: the licence for every supported setuptools release, and where an install works."""

import atexit
import shutil
import sys
import tempfile

from setuptools import setup

# In a folder of this process: in the checkout an install at the same time would delete what this one copies.
scratch = tempfile.mkdtemp(prefix="flash_mla-build-")
atexit.register(shutil.rmtree, scratch, ignore_errors=True)
options = {"build": {"build_base": scratch}}
if not {"develop", "sdist"} & set(sys.argv):  # whose metadata belong into the checkout
    options["egg_info"] = {"egg_base": scratch}

setup(license="BSD-3-Clause", options=options)
