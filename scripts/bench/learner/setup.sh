#!/usr/bin/env bash
# Makes .venv-trl with TRL, which our learner is compared with. It sees the packages of the project's .venv (torch,
# transformers, accelerate and datasets are the same ones), so TRL alone is downloaded, from PyPI. A second call does
# nothing.
#
#     bash scripts/bench/learner/setup.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../../.."

readonly trl=trl==1.16.0 venv=$PWD/.venv-trl ours=$PWD/.venv

site_of() { "$1/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))'; }

if [ ! -x "$venv/bin/python" ]; then
  "$ours/bin/python" -m venv --without-pip "$venv"
fi
echo "import site; site.addsitedir('$(site_of "$ours")')" > "$(site_of "$venv")/project.pth"
if ! "$venv/bin/python" -c 'import trl' 2>/dev/null; then
  "$ours/bin/python" -m pip --python "$venv/bin/python" install --no-deps "$trl"
fi
"$venv/bin/python" -c 'import torch, trl, transformers as t; print("trl", trl.__version__, "transformers", t.__version__, "torch", torch.__version__)'
