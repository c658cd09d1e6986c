//! Tools of the MCP server. A coding agent calls them to use sandboxes.
//!
//! The client, for example an editor, sends a call of a tool with arguments in JSON, and receives
//! text or JSON.

mod code;
mod commands;
mod files;
mod network;
mod run;
mod sandboxes;
mod snapshots;
mod transfer;

use crate::catalog::ToolEntry;

/// Tools with an argument `sandbox` that a server with one sandbox for all calls does not offer,
/// because they create or remove sandboxes.
const NOT_FOR_ONE_SANDBOX: [&str; 3] = ["fork", "promote", "sandbox_end"];

/// Returns all tools.
pub fn all() -> Vec<ToolEntry> {
    [
        run::tools(),
        sandboxes::tools(),
        commands::tools(),
        code::tools(),
        files::tools(),
        transfer::tools(),
        snapshots::tools(),
        network::tools(),
    ]
    .into_iter()
    .flatten()
    .collect()
}

/// Returns whether a server with one sandbox for all calls has the tool.
pub fn is_for_one_sandbox(entry: &ToolEntry) -> bool {
    entry.has_sandbox() && !NOT_FOR_ONE_SANDBOX.contains(&&*entry.tool.name)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::catalog::Effect;
    use std::collections::BTreeSet;

    #[test]
    fn tools_have_the_documented_names_schemas_and_hints() {
        let tools = all();
        let names: BTreeSet<&str> = tools.iter().map(|entry| &*entry.tool.name).collect();
        let expected = "diff download file_edit file_list file_read file_search file_write fork \
                        preview_link promote rollback run_code sandbox_create sandbox_end \
                        sandbox_exec sandbox_list sandbox_process sandbox_run snapshot upload";
        assert_eq!(names, expected.split_whitespace().collect());
        for entry in &tools {
            let tool = &entry.tool;
            assert_eq!(tool.input_schema["type"], "object", "{}", tool.name);
            assert_eq!(
                tool.input_schema["additionalProperties"], false,
                "{}",
                tool.name
            );
            let output = tool.output_schema.as_ref().unwrap();
            assert_eq!(output["type"], "object", "{}", tool.name);
            let hints = tool.annotations.as_ref().unwrap();
            let is_read_only = entry.effect == Effect::ReadOnly;
            assert_eq!(hints.read_only_hint, Some(is_read_only), "{}", tool.name);
            assert!(
                is_read_only || hints.destructive_hint.is_some(),
                "{}",
                tool.name
            );
            for (name, schema) in tool.input_schema["properties"].as_object().unwrap() {
                assert!(schema.get("description").is_some(), "{}: {name}", tool.name);
            }
            // Clients of several model providers support one type per value.
            for schema in [&tool.input_schema, output] {
                let text = serde_json::to_string(schema).unwrap();
                for word in ["null", "anyOf", "\"format\":\"int", "\"format\":\"uint"] {
                    assert!(!text.contains(word), "{}: {text}", tool.name);
                }
            }
        }
    }

    #[test]
    fn a_bound_tool_has_no_argument_for_the_sandbox() {
        for mut entry in all().into_iter().filter(is_for_one_sandbox) {
            entry.bind("abc".to_owned());
            assert!(!entry.has_sandbox(), "{}", entry.tool.name);
            let required = entry.tool.input_schema.get("required");
            let required = required.and_then(|r| r.as_array());
            assert!(!required.is_some_and(|r| r.iter().any(|name| name == "sandbox")));
        }
    }
}
