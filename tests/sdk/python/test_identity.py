"""Identity tokens are defined by the unmodified package, and verified with published keys."""

import json
import os
import urllib.request

import pytest
from e2b import SandboxException, Secret
from jwt import PyJWKSet

# Identity token for AWS.
AWS = Secret.iam_token(audience="sts.amazonaws.com", token_type="JWT-SVID")


def bearer(name):
    """Returns rules that add the token with this name to requests, as the package resolves them."""
    return {"api.example.com": [{"transform": lambda ctx: {"headers": {"authorization": f"Bearer {ctx.iam.tokens[name]}"}}}]}


async def test_rules_refer_to_the_tokens_of_the_create(sdk, create):
    sandbox = await create(iam={"tokens": {"aws": AWS}}, network={"rules": bearer("aws")})
    shown = (await sdk(sandbox.get_info)).network["rules"]
    headers = {"authorization": "Bearer ${e2b.identity.tokens.aws}"}
    assert shown == {"api.example.com": [{"transform": {"headers": headers}}]}
    await sdk(sandbox.update_network, {"rules": bearer("aws")})
    with pytest.raises(SandboxException) as refusal:
        await sdk(sandbox.update_network, {"rules": bearer("gcp")})
    assert refusal.value.status_code == 400


async def test_other_types_of_tokens_are_rejected(create):
    with pytest.raises(SandboxException) as refusal:
        await create(iam={"tokens": {"aws": {**AWS, "token_type": "other"}}})
    assert refusal.value.status_code == 400


def test_the_published_keys_are_readable_by_a_verifier():
    def fetch(path):
        with urllib.request.urlopen(os.environ["E2B_API_URL"] + path) as response:
            return response.read()

    issuer = json.loads(fetch("/.well-known/openid-configuration"))
    assert issuer["jwks_uri"] == issuer["issuer"] + "/.well-known/jwks.json"
    keys = PyJWKSet.from_json(fetch("/.well-known/jwks.json").decode())
    assert [key.algorithm_name for key in keys.keys] == ["ES256"]
