"""The page at `/`: one file, which asks this daemon's API and nobody else. The browser is told to run nothing but
what stands in it."""

import base64
import hashlib
import re
from collections.abc import Awaitable, Callable
from importlib import resources

from aiohttp import web

__all__ = ["page", "policy"]


def policy(html: str) -> str:
    """The content security policy under which the page's own script and style run, and no other."""

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
