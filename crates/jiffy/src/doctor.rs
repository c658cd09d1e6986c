//! `jiffy doctor`: can this host run sandboxes, and if not, what mends it.

mod checks;
mod files;
mod guest;
mod kernel;
mod measure;
mod security;

use crate::cli::DoctorArgs;
use serde::Serialize;
use std::process::ExitCode;

/// Outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Status {
    /// As it should be.
    Ok,
    /// Works, but could be better.
    Note,
    /// Sandboxes will not run.
    Fail,
}

/// One line of the report.
#[derive(Debug, Serialize)]
pub struct Finding {
    /// Subject of the check.
    pub what: &'static str,
    /// Its outcome.
    pub status: Status,
    /// Finding, in words.
    pub found: String,
    /// Remedy, unless all is as it should be.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remedy: Option<String>,
}

impl Finding {
    fn ok(what: &'static str, found: impl Into<String>) -> Self {
        Self {
            what,
            status: Status::Ok,
            found: found.into(),
            remedy: None,
        }
    }

    fn note(what: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what,
            status: Status::Note,
            found: found.into(),
            remedy: Some(remedy.into()),
        }
    }

    fn fail(what: &'static str, found: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            status: Status::Fail,
            ..Self::note(what, found, remedy)
        }
    }

    fn print(&self) {
        let mark = match self.status {
            Status::Ok => "ok  ",
            Status::Note => "note",
            Status::Fail => "FAIL",
        };
        outln!("{mark}  {:<14} {}", self.what, self.found);
        if let Some(remedy) = &self.remedy {
            outln!("      {:<14} -> {remedy}", "");
        }
    }
}

/// Runs all checks. Success means that sandboxes run here.
pub fn run(args: &DoctorArgs) -> anyhow::Result<ExitCode> {
    let mut findings = Vec::new();
    let mut tell = |finding: Finding| {
        if !args.json {
            finding.print();
        }
        findings.push(finding);
    };
    match args.security {
        true => security::run_all(&mut tell),
        false => checks::run_all(&mut tell),
    }
    let fit = |findings: &[Finding]| findings.iter().all(|f| f.status != Status::Fail);
    if !args.no_boot && !args.security {
        if fit(&findings) {
            let mut tell = |finding: Finding| {
                if !args.json {
                    finding.print();
                }
                findings.push(finding);
            };
            guest::boot(&mut tell);
            if args.measure && fit(&findings) {
                let mut tell = |finding: Finding| {
                    if !args.json {
                        finding.print();
                    }
                    findings.push(finding);
                };
                measure::run(args, &mut tell);
            }
        } else if !args.json {
            outln!("--    guest          not booted: mend the above first");
        }
    }
    if args.json {
        outln!("{}", jiffy_client::terminal::json(&findings)?);
    }
    Ok(if fit(&findings) {
        ExitCode::SUCCESS
    } else {
        ExitCode::FAILURE
    })
}
