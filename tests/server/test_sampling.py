from config import ServerConfig
from server.sampling import OutputLimit, output_limit


def test_a_request_that_names_no_limit_reserves_32768_tokens_or_what_fits():
    limit = OutputLimit(None, ServerConfig().default_max_tokens)
    assert output_limit(limit, 1000, 262_144) == 32_768
    assert output_limit(limit, 250_000, 262_144) == 12_144
