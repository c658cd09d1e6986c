#![no_main]
//! Requests of hosts to join a fleet, and join tokens, from the network. An accepted request or
//! token is equal after encoding, and no fleet accepts a token that it did not create.
use jiffy_fleet::join::JoinRequest;
use jiffy_fleet::tokens::Token;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|data: &[u8]| {
    if let Ok(request) = JoinRequest::decode(data) {
        let encoded = serde_json::to_vec(&request).unwrap();
        assert_eq!(JoinRequest::decode(&encoded), Ok(request));
    }
    if let Ok(text) = std::str::from_utf8(data)
        && let Ok(token) = text.parse::<Token>()
    {
        let again: Token = token.to_string().parse().unwrap();
        assert!(again == token);
        assert!(!token.is_of(&[0x5a; 32]));
    }
});
