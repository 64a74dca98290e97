"""Alignment of two tokenizations of one text by the bytes that their tokens stand for (methods.md §1)."""

from nemo_opd.alignment.aligner import TokenAligner
from nemo_opd.alignment.chat import ChatTokens, LocatedTokens, align_chat, locate_tokens
from nemo_opd.alignment.chat_render import ChatRenderer, RenderedChat
from nemo_opd.alignment.pieces import Pieces, fingerprint, pieces_of
from nemo_opd.alignment.token_roles import RoleOverrides, roles_of

__all__ = [
    "ChatRenderer",
    "ChatTokens",
    "LocatedTokens",
    "Pieces",
    "RenderedChat",
    "RoleOverrides",
    "TokenAligner",
    "align_chat",
    "fingerprint",
    "locate_tokens",
    "pieces_of",
    "roles_of",
]
