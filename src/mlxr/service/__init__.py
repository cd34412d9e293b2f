"""Text in, events out: the one path of a conversation, from messages to tokens, to the engine, and back to text."""
