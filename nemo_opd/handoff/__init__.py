"""How a teacher's output reaches the student's process without being copied through the driver."""
