//! Examples of requests for the reference of the API.

use jiffy_api::openapi;
use serde_json::Value;

/// Maximum width of a line.
const WIDTH: usize = 100;

/// Returns the example of an operation's request body.
fn body(operation: &Value) -> Option<&Value> {
    let body = &operation["requestBody"]["content"]["application/json"]["example"];
    (!body.is_null()).then_some(body)
}

/// Returns the parameters of an operation in `place` that have an example.
fn examples<'a>(
    operation: &'a Value,
    place: &'a str,
) -> impl Iterator<Item = (&'a str, &'a Value)> + 'a {
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    parameters
        .filter(move |parameter| parameter["in"] == place && !parameter["example"].is_null())
        .map(|parameter| (parameter["name"].as_str().unwrap(), &parameter["example"]))
}

/// Returns a parameter's value as in a URL.
fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Array(items) => items.iter().map(text).collect::<Vec<_>>().join(","),
        value => value.to_string(),
    }
}

/// Returns the URL of an example: its path and its query.
fn url(path: &str, operation: &Value) -> String {
    let mut url = path.to_owned();
    for (name, value) in examples(operation, "path") {
        url = url.replace(&format!("{{{name}}}"), &text(value));
    }
    let query: Vec<String> = examples(operation, "query")
        .map(|(name, value)| format!("{name}={}", text(value)))
        .collect();
    if query.is_empty() {
        url
    } else {
        format!("{url}?{}", query.join("&"))
    }
}

/// Returns the `curl` command of an example request.
pub fn curl(method: &str, path: &str, operation: &Value) -> String {
    let id = operation["operationId"].as_str().unwrap();
    let url = format!("\"$API{}\"", url(path, operation));
    let key = if operation["security"].is_array() {
        ""
    } else {
        "-H \"X-API-KEY: $KEY\" "
    };
    let body = body(operation);
    // `curl` sends GET without a body, and POST with one.
    let is_default_method = method == if body.is_some() { "POST" } else { "GET" };
    let method = if is_default_method {
        String::new()
    } else {
        format!("-X {method} ")
    };
    let mut command = format!("curl {key}{method}{url}");
    if command.len() > WIDTH {
        command = format!("curl {key}{method}\\\n  {url}");
    }
    match (id, body) {
        ("deployFunction", _) => {
            let settings = r#"-F 'settings={"public":true};type=application/json'"#;
            format!("curl {key}{url} \\\n  {settings} -F module=@hello.wasm")
        }
        ("upload", _) => format!("curl -T files.tar.gz {url}"),
        ("streamPort", _) => upgrade(&command, "tcp"),
        ("leaseSandbox", _) => upgrade(&command, "lease"),
        ("streamSshAgent", _) => upgrade(&command, "ssh-agent"),
        (_, Some(body)) => format!("{command} \\\n  --json '{body}'"),
        (_, None) => command,
    }
}

fn upgrade(command: &str, protocol: &str) -> String {
    format!("{command} \\\n  --http1.1 -N -H 'Connection: Upgrade' -H 'Upgrade: {protocol}'")
}

/// Returns whether the document has an example of the operation: of its request, or of its
/// response.
fn has_example(operation: &Value) -> bool {
    let answers = operation["responses"].as_object().unwrap().values();
    let mut contents = answers
        .chain([&operation["requestBody"]])
        .filter_map(|part| part["content"].as_object())
        .flat_map(|content| content.values());
    let has_parameter = ["path", "query"].map(|place| examples(operation, place).count() > 0);
    has_parameter.contains(&true) || contents.any(|content| !content["example"].is_null())
}

#[test]
fn every_operation_of_the_document_has_examples() {
    let document = openapi::document();
    for operations in document["paths"].as_object().unwrap().values() {
        for operation in operations.as_object().unwrap().values() {
            let id = operation["operationId"].as_str().unwrap();
            assert!(has_example(operation), "{id} has no example");
            let content = &operation["requestBody"]["content"];
            let is_required = operation["requestBody"]["required"] == true;
            for content in content.as_object().into_iter().flatten() {
                let example = &content.1["example"];
                assert!(
                    !is_required || !example.is_null(),
                    "{id} has no example of its body"
                );
                if !example.is_null() {
                    check_body(id, &document, &content.1["schema"], example);
                }
            }
            for (status, answer) in operation["responses"].as_object().unwrap() {
                let content = &answer["content"]["application/json"];
                if status.starts_with('2') && content.is_object() {
                    assert!(
                        !content["example"].is_null(),
                        "{id}: no example of {status}"
                    );
                }
            }
        }
    }
}

/// Checks that the fields of an example exist and that no required field is missing. Redocly and
/// the contract suite compare examples with whole schemas.
fn check_body(id: &str, document: &Value, schema: &Value, body: &Value) {
    let reference = [schema, &schema["anyOf"][0]]
        .into_iter()
        .find_map(|schema| schema["$ref"].as_str());
    let name = reference.unwrap().rsplit('/').next().unwrap();
    let schema = &document["components"]["schemas"][name];
    for name in body.as_object().unwrap().keys() {
        let field = &schema["properties"][name];
        assert!(!field.is_null(), "{id}: no field {name}");
    }
    for name in schema["required"].as_array().into_iter().flatten() {
        let field = &body[name.as_str().unwrap()];
        assert!(!field.is_null(), "{id}: {name} is missing");
    }
}
