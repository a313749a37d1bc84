#!/bin/bash
# The official Python clients and LangChain's: judge.sh URL
set -euo pipefail
here=$(dirname "$0")
. "$here/../environment.sh"
bin=$(environment clients openai==3.57.0 anthropic==2.14.0 langchain-openai==1.7.4)
"$bin/python" "$here/check.py" "$1"
