"""Engines that continue prompts, token by token."""
