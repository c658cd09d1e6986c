//! Generator of `docs/cli-reference.md` from the definitions of the command line, and a test that
//! the document is current.

use super::Cli;
use clap::{Arg, ArgAction, Command, CommandFactory};
use std::fmt::Write as _;
use std::path::Path;

/// Environment variable that makes the test write the document instead of comparing it.
const WRITE: &str = "JIFFY_WRITE_DOCS";
/// Maximum line length in characters.
const WIDTH: usize = 100;

/// Appends `text` wrapped to [`WIDTH`] columns. `first` is the prefix of the first line, and `rest`
/// the prefix of the other lines.
fn wrap(out: &mut String, first: &str, rest: &str, text: &str) {
    let words: Vec<&str> = text.split_whitespace().collect();
    let options = textwrap::Options::new(WIDTH)
        .initial_indent(first)
        .subsequent_indent(rest)
        .word_splitter(textwrap::WordSplitter::NoHyphenation)
        .break_words(false);
    out.push_str(&textwrap::fill(&words.join(" "), options));
    out.push('\n');
}

/// Returns the names of an option, such as `-c, --cpus <N>`.
fn names(arg: &Arg) -> String {
    let mut names = Vec::new();
    names.extend(arg.get_short().map(|short| format!("-{short}")));
    names.extend(arg.get_long().map(|long| format!("--{long}")));
    for alias in arg.get_visible_aliases().unwrap_or_default() {
        names.push(format!("--{alias}"));
    }
    let mut text = names.join(", ");
    if matches!(arg.get_action(), ArgAction::Set | ArgAction::Append) {
        for value in arg.get_value_names().unwrap_or_default() {
            text.push_str(&format!(" <{value}>"));
        }
    }
    text
}

/// Appends an option or argument: names, help, values, default, environment variable.
fn argument(out: &mut String, arg: &Arg) {
    let name = if arg.is_positional() {
        let value = arg.get_value_names().unwrap_or_default().join(" ");
        format!("<{value}>")
    } else {
        names(arg)
    };
    let help = arg.get_long_help().or_else(|| arg.get_help());
    let mut text = format!(
        "`{name}`: {}.",
        help.map(ToString::to_string)
            .unwrap_or_default()
            .trim_end_matches('.')
    );
    // Flags have implicit values and defaults, which are not shown.
    let takes_value = matches!(arg.get_action(), ArgAction::Set | ArgAction::Append);
    if takes_value && !arg.is_hide_possible_values_set() {
        let values: Vec<String> = arg
            .get_possible_values()
            .iter()
            .filter(|value| !value.is_hide_set())
            .map(|value| format!("`{}`", value.get_name()))
            .collect();
        if !values.is_empty() {
            let _ = write!(text, " Values: {}.", values.join(", "));
        }
    }
    if takes_value && !arg.is_hide_default_value_set() {
        let defaults: Vec<_> = arg
            .get_default_values()
            .iter()
            .map(|value| format!("`{}`", value.to_string_lossy()))
            .collect();
        if !defaults.is_empty() {
            let _ = write!(text, " Default: {}.", defaults.join(", "));
        }
    }
    if let Some(variable) = arg.get_env() {
        let _ = write!(text, " Environment: `{}`.", variable.to_string_lossy());
    }
    wrap(out, "- ", "  ", &text);
}

/// Appends a command and its subcommands.
fn command(out: &mut String, path: &str, command: &Command) {
    let path = format!("{path}{}", command.get_name());
    let _ = writeln!(out, "\n## `{path}`");
    if let Some(about) = command.get_long_about().or_else(|| command.get_about()) {
        wrap(
            out,
            "",
            "",
            &format!("{}.", about.to_string().trim_end_matches('.')),
        );
    }
    let aliases: Vec<_> = command
        .get_visible_aliases()
        .map(|alias| format!("`{alias}`"))
        .collect();
    if !aliases.is_empty() {
        let _ = writeln!(out, "\nAliases: {}.", aliases.join(", "));
    }
    // Rendering the usage changes the command.
    let mut command = command.clone();
    let usage = command.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage:").trim();
    let _ = writeln!(out, "\n```\n{usage}\n```");
    let is_visible =
        |arg: &&Arg| !arg.is_hide_set() && !matches!(arg.get_id().as_str(), "help" | "version");
    let mut list = String::new();
    for arg in command.get_positionals().filter(is_visible) {
        argument(&mut list, arg);
    }
    for arg in command.get_arguments().filter(is_visible) {
        if !arg.is_positional() {
            argument(&mut list, arg);
        }
    }
    if !list.is_empty() {
        let _ = write!(out, "\n{list}");
    }
    for subcommand in command.get_subcommands() {
        if !subcommand.is_hide_set() && subcommand.get_name() != "help" {
            self::command(out, &format!("{path} "), subcommand);
        }
    }
}

/// Returns the whole document.
fn document() -> String {
    let mut root = Cli::command();
    root.build();
    let mut out = "# Reference of the command line\n\n\
        Generated from the help texts by `make docs`. [Commands](cli.md) describes how they work\n\
        together.\n"
        .to_owned();
    for subcommand in root.get_subcommands() {
        if !subcommand.is_hide_set() && subcommand.get_name() != "help" {
            command(&mut out, "jiffy ", subcommand);
        }
    }
    out
}

#[test]
fn the_reference_of_the_command_line_is_current() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/cli-reference.md");
    let document = document();
    if std::env::var_os(WRITE).is_some() {
        std::fs::write(&path, document).unwrap();
        return;
    }
    let current = std::fs::read_to_string(&path).unwrap_or_default();
    assert!(
        current == document,
        "docs/cli-reference.md is outdated; update it with: make docs"
    );
}
