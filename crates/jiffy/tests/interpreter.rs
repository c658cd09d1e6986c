//! Tests for the stock template `code-interpreter-v1`: execution, state, and independence of
//! clones. The *kernel* of a language is the process that executes its code and has its state.

use crate::support::page_faults;
use crate::support::sandbox_http::{ask, execute, result, send, stdout};
use crate::support::test_home::TestHome;
use jiffy_test_attributes::jiffy_test;
use serde_json::{Value, json};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const TEMPLATE: &str = "code-interpreter-v1";
/// Port of the code interpreter in a sandbox.
const PORT: u16 = 49_999;
/// Lower bound of the pages that a guest has written after its first use, which is its first
/// request to the interpreter. A guest that was only started has written fewer.
const FIRST_USE_PAGES: u64 = 3500;

fn error(events: &[Value]) -> &Value {
    events.iter().find(|e| e["type"] == "error").unwrap()
}

#[jiffy_test(template = "code-interpreter-v1")]
fn code_runs_in_four_languages_and_its_state_persists() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--template", TEMPLATE, "-e", "GREETING=hello"]);
    let id = id.as_str();
    let first = Instant::now();
    assert_eq!(result(&test_home, id, "python", "1 + 1"), "2");
    eprintln!("first execution after create: {:?}", first.elapsed());
    assert_eq!(result(&test_home, id, "python", "x = 41\nx + 1"), "42");
    assert_eq!(result(&test_home, id, "python", "x"), "41");
    let who = "import os, getpass; (getpass.getuser(), os.getcwd(), os.environ['GREETING'])";
    assert_eq!(
        result(&test_home, id, "python", who),
        "('user', '/home/user', 'hello')"
    );

    let plot = "import matplotlib.pyplot as plt\nplt.plot([1, 2], [3, 4], label='up')\nplt.title('Rise')\nplt.show()";
    let events = execute(&test_home, id, &json!({ "code": plot, "context_id": null }));
    let shown = events.iter().find(|e| e["type"] == "result").unwrap();
    // The signature of PNG files in Base64.
    assert!(shown["png"].as_str().unwrap().starts_with("iVBORw0KGgo"));
    assert_eq!(shown["chart"]["type"], "line");
    assert_eq!(shown["chart"]["title"], "Rise");
    assert_eq!(
        shown["chart"]["elements"][0],
        json!({ "label": "up", "points": [[1.0, 3.0], [2.0, 4.0]] })
    );
    let table = "import pandas as pd\npd.DataFrame({'a': [1, 2], 'b': [None, 'z']})";
    let events = execute(&test_home, id, &json!({ "code": table }));
    let shown = events.iter().find(|e| e["type"] == "result").unwrap();
    assert_eq!(shown["data"], json!({ "a": [1, 2], "b": [null, "z"] }));
    assert!(shown["html"].as_str().unwrap().contains("<table"));
    let events = execute(&test_home, id, &json!({ "code": "1/0" }));
    assert_eq!(error(&events)["name"], "ZeroDivisionError");

    let once = json!({ "code": "print(os.environ.get('ONCE'))", "env_vars": { "ONCE": "now" } });
    assert_eq!(stdout(&execute(&test_home, id, &once)), "now\n");
    let later = json!({ "code": "print(os.environ.get('ONCE'))" });
    assert_eq!(stdout(&execute(&test_home, id, &later)), "None\n");

    execute(
        &test_home,
        id,
        &json!({ "code": "cd /tmp; N=7", "language": "bash" }),
    );
    let shell = json!({ "code": "echo $PWD $N $GREETING", "language": "bash" });
    assert_eq!(stdout(&execute(&test_home, id, &shell)), "/tmp 7 hello\n");
    let failing = execute(
        &test_home,
        id,
        &json!({ "code": "(exit 3)", "language": "bash" }),
    );
    assert_eq!(error(&failing)["value"], "3");

    assert_eq!(
        result(
            &test_home,
            id,
            "javascript",
            "const n = await Promise.resolve(20); n"
        ),
        "20"
    );
    assert_eq!(result(&test_home, id, "javascript", "n + 1"), "21");
    assert_eq!(
        result(
            &test_home,
            id,
            "javascript",
            "import { join } from 'path'; join(process.env.GREETING, 'you')"
        ),
        "hello/you"
    );
    assert_eq!(
        result(
            &test_home,
            id,
            "typescript",
            "const t: number = 3; t as number * 2"
        ),
        "6"
    );

    let (status, made) = ask(
        &test_home,
        id,
        PORT,
        "POST",
        "/contexts",
        &json!({ "cwd": "/tmp" }),
    );
    assert_eq!(status, 200, "{made}");
    let made: Value = serde_json::from_str(&made).unwrap();
    let there = json!({ "code": "import os; print('x' in globals(), os.getcwd())", "context_id": made["id"] });
    assert_eq!(stdout(&execute(&test_home, id, &there)), "False /tmp\n");
    let path = format!("/contexts/{}", made["id"].as_str().unwrap());
    assert_eq!(
        ask(&test_home, id, PORT, "DELETE", &path, &json!({})).0,
        204
    );
    assert_eq!(ask(&test_home, id, PORT, "POST", "/execute", &there).0, 404);
    // A request must not name a context and a language: the context already has a language.
    let both = json!({ "code": "1", "context_id": "a", "language": "python" });
    assert_eq!(ask(&test_home, id, PORT, "POST", "/execute", &both).0, 400);
    installs_packages(&test_home, id);
    has_libraries_and_fonts(&test_home, id);
    restarts_after_exit(&test_home, id);
}

/// Tests that the running kernel finds packages that the user installs, and all users their
/// programs.
fn installs_packages(test_home: &TestHome, id: &str) {
    let wheel = r#"
import zipfile
with zipfile.ZipFile("/tmp/mine-1-py3-none-any.whl", "w") as wheel:
    def write(name, text): wheel.writestr(name, text)
    write("mine.py", "def main(): print('installed')\n")
    write("mine-1.dist-info/METADATA", "Metadata-Version: 2.1\nName: mine\nVersion: 1\n")
    write("mine-1.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
    write("mine-1.dist-info/entry_points.txt", "[console_scripts]\nmine-tool = mine:main\n")
    write("mine-1.dist-info/RECORD", "")
"#;
    execute(test_home, id, &json!({ "code": wheel }));
    let install = "%pip install --quiet --no-index /tmp/mine-1-py3-none-any.whl";
    let events = execute(test_home, id, &json!({ "code": install }));
    assert!(events.iter().all(|e| e["type"] != "error"), "{events:?}");
    let python = json!({ "code": "import mine; mine.main()\n!mine-tool" });
    let printed = stdout(&execute(test_home, id, &python)).replace('\r', "");
    assert_eq!(printed, "installed\ninstalled\n");
    let bash = json!({ "code": "mine-tool", "language": "bash" });
    assert_eq!(stdout(&execute(test_home, id, &bash)), "installed\n");
    assert_eq!(test_home.ok(&["exec", id, "--", "mine-tool"]), "installed");
}

/// The libraries of E2B's template exist, and charts have Chinese, Japanese and Korean characters.
fn has_libraries_and_fonts(test_home: &TestHome, id: &str) {
    let missing = "import importlib.util as u\n\
        names = 'aiohttp bokeh bs4 cv2 docx gensim imageio joblib librosa matplotlib nltk numpy openpyxl orjson \
        pandas PIL plotly pytest pytz requests scipy seaborn skimage sklearn soundfile spacy sympy textblob tornado \
        urllib3 xarray xlrd'\n\
        [name for name in names.split() if u.find_spec(name) is None]";
    assert_eq!(result(test_home, id, "python", missing), "[]");
    let chart = "import matplotlib.pyplot as plt, seaborn\nseaborn.set_theme()\n\
        plt.plot([1, 2])\nplt.title('图表 グラフ 차트')\nplt.show()";
    let events = execute(test_home, id, &json!({ "code": chart }));
    assert!(events.iter().any(|e| e["png"].is_string()), "{events:?}");
    // Missing characters cause a warning.
    assert!(events.iter().all(|e| e["type"] != "stderr"), "{events:?}");
}

/// Tests that `exit()` resets the state and has no other effect.
fn restarts_after_exit(test_home: &TestHome, id: &str) {
    let events = execute(test_home, id, &json!({ "code": "gone = 1\nexit()" }));
    assert!(events.iter().all(|e| e["type"] != "error"), "{events:?}");
    assert_eq!(
        result(test_home, id, "python", "'gone' in globals()"),
        "False"
    );
}

#[jiffy_test(template = "code-interpreter-v1")]
fn clones_draw_random_numbers_of_their_own_and_have_their_own_environment() {
    let test_home = TestHome::new();
    let draw = "import random, numpy\nf'{random.random()} {numpy.random.rand()}'";
    let one = test_home.ok(&["create", "--template", TEMPLATE, "-e", "NAME=one"]);
    let two = test_home.ok(&["create", "--template", TEMPLATE, "-e", "NAME=two"]);
    let mut drawn = BTreeSet::new();
    for (id, name) in [(&one, "one"), (&two, "two")] {
        drawn.insert(result(&test_home, id, "python", draw));
        let env = "import os; os.environ['NAME']";
        assert_eq!(result(&test_home, id, "python", env), name);
        let quiet = json!({ "code": "RANDOM=1; y = 1", "language": "bash" });
        execute(&test_home, id, &quiet);
    }
    assert_eq!(drawn.len(), 2, "{drawn:?}");

    // The kernels of all languages are running when they are copied; their random generators have
    // the same state.
    result(&test_home, &one, "javascript", "Math.random()");
    execute(
        &test_home,
        &one,
        &json!({ "code": "random.seed(1); numpy.random.seed(1)" }),
    );
    let before = test_home.vmms();
    let children = test_home.ok(&["fork", &one, "--count", "2"]);
    let vmms: Vec<u32> = test_home.vmms().difference(&before).copied().collect();
    let ids: Vec<&str> = children.lines().chain([one.as_str()]).collect();
    let script = json!({ "code": "echo $RANDOM $RANDOM $RANDOM", "language": "bash" });
    let of = |f: &dyn Fn(&str) -> String| ids.iter().map(|id| f(id)).collect::<BTreeSet<_>>();
    for drawn in [
        of(&|id| result(&test_home, id, "python", draw)),
        of(&|id| result(&test_home, id, "javascript", "Math.random()")),
        of(&|id| stdout(&execute(&test_home, id, &script))),
    ] {
        assert_eq!(drawn.len(), ids.len(), "{drawn:?}");
    }
    // The pages of the first use were copied in each: at its start if it was the only sandbox that
    // was starting, otherwise at its first request.
    assert_eq!(vmms.len(), 2);
    let faults: Vec<u64> = vmms.iter().map(|vmm| page_faults(*vmm)).collect();
    assert!(faults.iter().all(|f| *f > FIRST_USE_PAGES), "{faults:?}");
}

#[jiffy_test(template = "code-interpreter-v1")]
fn a_client_that_disconnects_interrupts_its_code() {
    let test_home = TestHome::new();
    let id = test_home.ok(&["create", "--template", TEMPLATE]);
    let endless = [
        (
            "python",
            "import time\nprint('begun', flush=True)\nwhile True: time.sleep(0.1)",
        ),
        ("bash", "echo begun; while :; do :; done"),
        ("javascript", "console.log('begun'); while (true) {}"),
    ];
    for (language, code) in endless {
        let body = json!({ "code": code, "language": language });
        let mut stream = send(&test_home, &id, PORT, "POST", "/execute", &body);
        crate::support::read_until(&mut stream, "begun");
        let exit_time = Instant::now();
        drop(stream);
        let quick = json!({ "code": "1", "language": language });
        let quick = if language == "bash" {
            json!({ "code": ":", "language": "bash" })
        } else {
            quick
        };
        execute(&test_home, &id, &quick);
        assert!(
            exit_time.elapsed() < Duration::from_secs(20),
            "{language}: {:?}",
            exit_time.elapsed()
        );
    }
}
