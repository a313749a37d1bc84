#!/bin/bash
# Agent frameworks, pointed at the system as at any OpenAI server: judge.sh URL
set -euo pipefail
here=$(dirname "$0")
. "$here/../environment.sh"
bin=$(environment frameworks instructor==1.17.0 litellm==1.106.12 llama-index-llms-openai-like==0.8.1 openai-agents==0.20.0 'pydantic-ai-slim[openai]==2.31.1')
LITELLM_LOCAL_MODEL_COST_MAP=True "$bin/python" "$here/check.py" "$1"
