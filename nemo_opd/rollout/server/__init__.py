"""Engines that sample on a server, in its own process and environment."""
