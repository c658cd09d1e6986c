//! Work of the function, apart from its interface.

/// Status, content type and body of the response.
pub type Response = (u16, &'static str, String);

/// Returns the response to one request.
#[cfg_attr(not(target_os = "wasi"), allow(dead_code))]
pub fn handle(method: &str, _path: &str, body: &[u8]) -> Response {
    if method != "POST" {
        return (405, "text/plain", "send a text by POST\n".to_owned());
    }
    let Ok(text) = std::str::from_utf8(body) else {
        return (400, "text/plain", "the text is not UTF-8\n".to_owned());
    };
    let (lines, words) = (text.lines().count(), text.split_whitespace().count());
    let characters = text.chars().count();
    let counts = format!(r#"{{"lines":{lines},"words":{words},"characters":{characters}}}"#);
    (200, "application/json", counts + "\n")
}

#[cfg(test)]
mod tests {
    use super::handle;

    #[test]
    fn a_text_is_counted() {
        let (status, _, body) = handle("POST", "/", "one two\nthrée\n".as_bytes());
        assert_eq!(status, 200);
        assert_eq!(body, "{\"lines\":2,\"words\":3,\"characters\":14}\n");
    }

    #[test]
    fn others_are_refused() {
        assert_eq!(handle("GET", "/", b"").0, 405);
        assert_eq!(handle("POST", "/", b"\xff").0, 400);
    }
}
