"""vLLM as the engine: inside the trainer's processes, or as a server beside them. It is imported where it is used."""
