"""Served teachers: requests to their servers, and rows from the answers (methods.md §13.3).

`rollout.server.client` sends the requests; `workers.teacher_worker.ServedTeacherWorker` hands the rows over.
"""
