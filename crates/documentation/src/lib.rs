//! The pages of the documentation, and the two texts from which agents learn a project: a list of
//! the pages (`llms.txt`) and all pages in one text (`llms-full.txt`).

use std::fmt::Write;

/// Content of the first lines of the list.
const ABOUT: &str = "Jiffy runs code of AI agents in sandboxes on your own Linux machine.";

/// Page in Markdown.
#[derive(Debug)]
pub struct Page {
    /// Title of its part of the book.
    pub part: &'static str,
    /// Title.
    pub title: &'static str,
    /// Path in `docs/`, for example `integrations/codex.md`.
    pub path: &'static str,
    /// Content.
    pub text: &'static str,
}

// Defines `PAGES`.
include!(concat!(env!("OUT_DIR"), "/pages.rs"));

/// Returns all pages in the order of the book.
#[must_use]
pub fn pages() -> &'static [Page] {
    PAGES
}

/// Returns the page with this path.
#[must_use]
pub fn page(path: &str) -> Option<&'static Page> {
    PAGES.iter().find(|page| page.path == path)
}

/// Returns the list of all pages with their first sentences. `directory` precedes their paths.
#[must_use]
pub fn index(directory: &str) -> String {
    let mut text = format!("# Jiffy\n\n> {ABOUT}\n");
    let mut part = "";
    for page in PAGES {
        if page.part != part {
            part = page.part;
            // Writing to a string cannot fail, here and below.
            let _ = writeln!(text, "\n## {part}\n");
        }
        let Page { title, path, .. } = page;
        let sentence = first_sentence(page.text);
        let _ = match sentence.trim_end_matches(':') {
            "" => writeln!(text, "- [{title}]({directory}{path})"),
            sentence => writeln!(text, "- [{title}]({directory}{path}): {sentence}"),
        };
    }
    text
}

/// Returns the text of all pages.
#[must_use]
pub fn full() -> String {
    let texts: Vec<_> = PAGES.iter().map(|page| page.text).collect();
    texts.join("\n")
}

/// Returns the first sentence of the first paragraph of a page, without links.
fn first_sentence(text: &str) -> String {
    let mut words = String::new();
    let mut is_code = false;
    for line in text.lines() {
        if line.starts_with("```") {
            is_code = !is_code;
        }
        let is_prose = !line.starts_with(['#', '|', '<', '>', '-'])
            && !line.starts_with(|c: char| c.is_ascii_digit())
            && !line.starts_with("```");
        if is_code || words.is_empty() && !is_prose {
            continue;
        }
        match (line.trim(), words.is_empty()) {
            ("", true) => {}
            ("", false) => break,
            (line, is_first) => {
                if !is_first {
                    words.push(' ');
                }
                words.push_str(line);
            }
        }
    }
    let words = without_links(&words);
    let is_end = |&(at, mark): &(usize, &str)| {
        let next = words[at + mark.len()..].chars().next();
        next.is_some_and(|c| c.is_uppercase() || c == '`')
    };
    let mut ends: Vec<_> = words.match_indices(". ").collect();
    ends.extend(words.match_indices(": "));
    let end = ends.iter().filter(|end| is_end(end)).map(|end| end.0).min();
    end.map_or(&*words, |end| &words[..=end]).to_owned()
}

/// Replaces `[text](target)` with the text.
fn without_links(text: &str) -> String {
    let mut result = String::new();
    let mut rest = text;
    while let Some((before, link)) = rest.split_once('[') {
        result.push_str(before);
        let target = link.split_once(']').and_then(|(words, after)| {
            let (_, after) = after.strip_prefix('(')?.split_once(')')?;
            Some((words, after))
        });
        match target {
            Some((words, after)) => {
                result.push_str(words);
                rest = after;
            }
            None => {
                result.push('[');
                rest = link;
            }
        }
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_texts_contain_every_page() {
        let (index, full) = (index("docs/"), full());
        assert!(PAGES.len() > 40, "{}", PAGES.len());
        for page in PAGES {
            let entry = format!("- [{}](docs/{}): ", page.title, page.path);
            assert!(index.contains(&entry), "{entry}");
            assert!(full.contains(page.text), "{}", page.path);
            assert_eq!(super::page(page.path).unwrap().text, page.text);
        }
        assert!(super::page("../README.md").is_none());
    }

    #[test]
    fn the_first_sentence_of_the_first_paragraph_is_listed() {
        let text =
            "# Page\n| table |\n\n```\ncode\n```\n\nA [link\nto](x.md) a page. Another. `C`.\n";
        assert_eq!(first_sentence(text), "A link to a page.");
        let heading = "# Page\n\n## Part\nVersions of 1. x: `jiffy` runs.\n\nNo.\n";
        assert_eq!(first_sentence(heading), "Versions of 1. x:");
        assert_eq!(first_sentence("# Page\n- a list [a]\n"), "");
        assert_eq!(first_sentence("# Page\n`run` starts.\n"), "`run` starts.");
        assert_eq!(without_links("[a] (b) [c](d) [e"), "[a] (b) c [e");
    }
}
