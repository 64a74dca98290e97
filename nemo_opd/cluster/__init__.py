"""Ray: resources, processes and calls. The only package that imports it."""
