"""The asyncio HTTP front: OpenAI API, admission, routing, dispatch. Never imports torch."""
