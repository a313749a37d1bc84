"""The process that turns prompts into KV blocks and ships them."""
