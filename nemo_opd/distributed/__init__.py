"""Process groups and the meshes over them."""
