"""Where the client looks for a server, and which keys it sends."""

from __future__ import annotations

import pytest

from together_post_training.client.address import (
    Address,
    check_headers,
    resolve_address,
    resolve_key,
)

OWN = "TOGETHER_POST_TRAINING_ADDRESS"


@pytest.mark.parametrize(
    ("base_url", "environ", "expected"),
    [
        (None, {}, None),
        ("grpc://h:1", {}, "grpc://h:1"),
        ("grpcs://h:443", {}, "grpcs://h:443"),
        ("h:1", {}, "grpc://h:1"),
        (" grpc://h:1/ ", {}, "grpc://h:1"),
        ("[::1]:50051", {}, "grpc://[::1]:50051"),
        ("h:1", {OWN: "other:2"}, "grpc://h:1"),
        (None, {OWN: "h:1", "TINKER_BASE_URL": "other:2"}, "grpc://h:1"),
        (None, {"TINKER_BASE_URL": "h:1", "TOGETHER_BASE_URL": "other:2"}, "grpc://h:1"),
        (None, {"TOGETHER_BASE_URL": "grpcs://h:1"}, "grpcs://h:1"),
        # Another SDK's web address is none of ours.
        (None, {"TINKER_BASE_URL": "https://api.example.com"}, None),
        (None, {"TINKER_BASE_URL": "HTTP://h:1", "TOGETHER_BASE_URL": "h:2"}, "grpc://h:2"),
        (None, {OWN: ""}, None),
    ],
)
def test_address_is_the_first_that_is_given(base_url, environ, expected):
    found = resolve_address(base_url, environ)
    assert (found and str(found)) == expected


@pytest.mark.parametrize(
    "base_url",
    ["https://api.example.com", "http://localhost:8000", "HTTPS://x:1"],
)
def test_address_refuses_a_web_address_in_the_argument(base_url):
    with pytest.raises(ValueError, match=r"web address.*grpc://host:port"):
        resolve_address(base_url, {})


@pytest.mark.parametrize(
    "base_url", ["", "host", "h:0", "h:65536", "h:x", "ftp://h:1", "h:1/path", "a b:1"]
)
def test_address_refuses_what_is_no_address_with_its_value(base_url):
    with pytest.raises(ValueError, match="grpc://host:port") as refused:
        resolve_address(base_url, {})
    assert repr(base_url) in str(refused.value)


def test_address_names_the_variable_that_is_wrong():
    with pytest.raises(ValueError, match="TINKER_BASE_URL is 'nowhere'"):
        resolve_address(None, {"TINKER_BASE_URL": "nowhere"})
    with pytest.raises(ValueError, match=OWN):
        resolve_address(None, {OWN: "https://h:1"})


def test_address_refuses_a_value_that_is_not_a_string():
    with pytest.raises(TypeError, match="base_url"):
        resolve_address(50051, {})  # pyright: ignore[reportArgumentType]


def test_address_knows_its_target_and_security():
    assert resolve_address("grpcs://h:1", {}) == Address(target="h:1", secure=True)


@pytest.mark.parametrize(
    ("api_key", "environ", "expected"),
    [
        (None, {}, None),
        ("", {}, None),
        ("tml-123", {"TINKER_API_KEY": "other"}, "tml-123"),
        # Any key will do: a server of one's own asks for none.
        ("dummy", {}, "dummy"),
        (None, {"TINKER_API_KEY": "a", "TOGETHER_API_KEY": "b"}, "a"),
        (None, {"TINKER_API_KEY": "", "TOGETHER_API_KEY": "b"}, "b"),
    ],
)
def test_key_is_the_first_that_is_given(api_key, environ, expected):
    assert resolve_key(api_key, environ) == expected


@pytest.mark.parametrize("key", ["a\nb", "schlüssel", "a\x00", "tab\t"])
def test_key_that_no_header_can_hold_is_refused_without_being_repeated(key):
    with pytest.raises(ValueError, match="printable ASCII") as refused:
        resolve_key(key, {})
    assert key not in str(refused.value)


def test_key_of_another_type_is_refused():
    with pytest.raises(TypeError, match="int"):
        resolve_key(123, {})  # pyright: ignore[reportArgumentType]


def test_headers_are_sent_with_lower_case_names():
    assert check_headers({"CF-Access": "yes", "x_y.z": ""}) == {"cf-access": "yes", "x_y.z": ""}


@pytest.mark.parametrize("name", ["", "a b", "größe", "x-bin", 5])
def test_a_header_name_that_cannot_be_sent_is_refused_with_itself(name):
    with pytest.raises(ValueError, match="Header") as refused:
        check_headers({name: "x"})
    assert repr(name) in str(refused.value)


def test_a_header_value_that_cannot_be_sent_is_refused_without_being_repeated():
    with pytest.raises(ValueError, match=r"Header 'a' holds .* printable ASCII") as refused:
        check_headers({"a": "secret\n"})
    assert "secret" not in str(refused.value)
    with pytest.raises(TypeError, match="Header 'a' must be a string, got int"):
        check_headers({"a": 5})  # pyright: ignore[reportArgumentType]
