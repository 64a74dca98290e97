"""Engines that sample on a server, in its own process and environment, and the HTTP client, also of served teachers."""
