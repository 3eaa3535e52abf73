"""The page at `/`: one file that requests only this daemon's API. Its policy forbids the browser to run any other script."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

__all__ = ["page", "policy"]


def policy(html: str) -> str:
    """Return a content security policy that allows the page's script and style, and no others."""

    def inside(tag: str) -> str:
        found = re.search(rf"<{tag}>(.*?)</{tag}>", html, re.DOTALL)
        assert found, f"the page has no {tag}"
        return base64.b64encode(hashlib.sha256(found[1].encode()).digest()).decode()

    allowed = f"script-src 'sha256-{inside('script')}'; style-src 'sha256-{inside('style')}'; connect-src 'self'"
    return f"default-src 'none'; {allowed}; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


def page() -> Callable[[web.Request], Awaitable[web.Response]]:
    html = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    headers = {
        "Content-Security-Policy": policy(html),
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cache-Control": "no-cache",
    }

    async def get_page(request: web.Request) -> web.Response:
        return web.Response(text=html, content_type="text/html", charset="utf-8", headers=headers)

    return get_page
