"""Process groups, device meshes and tensor transfers."""
