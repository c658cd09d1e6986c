//! Commands of `jiffy` as text that the user can paste into a shell, with the options of this
//! process.

use crate::cli::HostArgs;

/// Options that select the server, as in the arguments of this process.
#[derive(Debug, Clone, Default)]
pub struct CommandText {
    options: Vec<String>,
}

impl CommandText {
    /// Creates the options. Environment variables are also set in the user's shell.
    pub fn new(host: &HostArgs) -> Self {
        let mut options = Vec::new();
        if let Some(url) = &host.url {
            options.extend(["--url".to_owned(), url.clone()]);
        }
        if let Some(file) = &host.key_file {
            options.extend(["--key-file".to_owned(), file.display().to_string()]);
        }
        Self { options }
    }

    /// Returns the command with these words, quoted for a POSIX shell.
    pub fn line(&self, words: &[&str]) -> String {
        let options = self.options.iter().map(String::as_str);
        let words = ["jiffy"]
            .into_iter()
            .chain(words.iter().copied())
            .chain(options);
        words.map(quoted).collect::<Vec<_>>().join(" ")
    }
}

fn quoted(word: &str) -> String {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "-_./:=@%+,".contains(c);
    if !word.is_empty() && word.chars().all(is_plain) {
        return word.to_owned();
    }
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_contain_the_server_and_are_quoted() {
        let host = HostArgs {
            url: Some("https://jiffy.example:8443".to_owned()),
            key_file: Some("my key".into()),
        };
        let text = CommandText::new(&host);
        assert_eq!(
            text.line(&["pause", "k3x9"]),
            "jiffy pause k3x9 --url https://jiffy.example:8443 --key-file 'my key'"
        );
        let text = CommandText::default();
        assert_eq!(text.line(&["kill", "$(x)"]), "jiffy kill '$(x)'");
        assert_eq!(text.line(&["kill", "it's", ""]), r"jiffy kill 'it'\''s' ''");
    }
}
