//! Tests of the builder's database, which records templates, their builds, and the log lines of
//! builds.
use super::schema::SCHEMA_V1;
use super::*;

/// Opens a database with one template.
fn records() -> (tempfile::TempDir, BuildRecords) {
    let dir = tempfile::tempdir().unwrap();
    let records = BuildRecords::open(dir.path()).unwrap();
    let template = TemplateRecord {
        id: "t1".into(),
        name: "mine".into(),
        owner: Some("k1".into()),
        public: false,
        created_ms: 1,
    };
    assert_eq!(records.insert_template(&template).unwrap(), template);
    (dir, records)
}

/// Returns the record of a waiting build.
fn a_build(id: &str, created_ms: u64) -> BuildRecord {
    BuildRecord {
        id: id.into(),
        template: "t1".into(),
        caller: None,
        tags: vec!["default".into()],
        size: WantedSize::default(),
        status: BuildStatus::Waiting,
        reason: None,
        steps: Vec::new(),
        version: None,
        created_ms,
        changed_ms: created_ms,
    }
}

#[test]
fn names_are_unique_per_owner() {
    let (_dir, records) = records();
    let of = |id: &str, owner: Option<&str>| TemplateRecord {
        id: id.into(),
        name: "mine".into(),
        owner: owner.map(str::to_owned),
        public: false,
        created_ms: 2,
    };
    let enter = |id, owner| records.insert_template(&of(id, owner)).unwrap().id;
    assert_eq!(enter("t2", Some("k2")), "t2");
    assert_eq!(enter("t3", Some("k2")), "t2");
    assert_eq!(enter("t4", None), "t4");
    assert_eq!(enter("t5", None), "t4");
    let named = |owner| {
        records
            .template_by_name(owner, "mine")
            .unwrap()
            .map(|t| t.id)
    };
    assert_eq!(named(Some("k1")).as_deref(), Some("t1"));
    assert_eq!(named(Some("k2")).as_deref(), Some("t2"));
    assert_eq!(named(None).as_deref(), Some("t4"));
    assert_eq!(named(Some("k3")), None);
    assert_eq!(records.template("t1").unwrap().unwrap().name, "mine");
    assert_eq!(records.template("mine").unwrap(), None);
}

#[test]
fn records_of_the_first_version_are_migrated_with_builds_and_lines() {
    let dir = tempfile::tempdir().unwrap();
    let old = Connection::open(dir.path().join("builds.db")).unwrap();
    let rows = "
        INSERT INTO templates VALUES ('t1', 'mine', 'k1', 1, 5), ('t2', 'his', NULL, 0, 6);
        INSERT INTO builds (id, template, tags, size, status, created_ms, changed_ms)
            VALUES ('b1', 't1', '[\"default\"]', '{}', 'ready', 7, 8);
        INSERT INTO lines VALUES ('b1', 0, 9, 'info', NULL, 'said');
        PRAGMA user_version = 1;
    ";
    old.execute_batch(&format!("{SCHEMA_V1} {rows}")).unwrap();
    drop(old);
    for _ in 0..2 {
        let records = BuildRecords::open(dir.path()).unwrap();
        let ids: Vec<String> = records
            .templates()
            .unwrap()
            .into_iter()
            .map(|t| t.id)
            .collect();
        assert_eq!(ids, ["t1", "t2"]);
        let mine = records
            .template_by_name(Some("k1"), "mine")
            .unwrap()
            .unwrap();
        assert!(mine.public);
        let build = &records.builds("t1").unwrap()[0];
        assert_eq!((build.id.as_str(), &build.caller), ("b1", &None));
        let which = LogQuery {
            from: LogPosition::Number(0),
            limit: 9,
            backwards: false,
            level: LogLevel::Debug,
        };
        assert_eq!(records.log_lines("b1", which).unwrap().len(), 1);
    }
    let records = BuildRecords::open(dir.path()).unwrap();
    records.delete_template("t1").unwrap();
    assert_eq!(records.build("b1").unwrap(), None);
    drop(records);
    let newer = Connection::open(dir.path().join("builds.db")).unwrap();
    newer.pragma_update(None, "user_version", 3).unwrap();
    assert!(matches!(
        BuildRecords::open(dir.path()),
        Err(RecordError::Version { found: 3, .. })
    ));
}

#[test]
fn a_build_ends_once() {
    let (_dir, records) = records();
    records.insert_build(&a_build("b1", 1)).unwrap();
    assert!(
        records
            .transition("b1", BuildStatus::Waiting, BuildStatus::Building)
            .unwrap()
    );
    assert!(
        !records
            .transition("b1", BuildStatus::Waiting, BuildStatus::Building)
            .unwrap()
    );
    records.set_ready("b1", &["s".into()], "v").unwrap();
    let late = FailureReason {
        message: "too late".into(),
        step: None,
    };
    records.set_failed("b1", &late).unwrap();
    let build = records.build("b1").unwrap().unwrap();
    assert_eq!((build.status, build.reason), (BuildStatus::Ready, None));
    records.insert_build(&a_build("b2", 2)).unwrap();
    assert_eq!(records.fail_unfinished(&late).unwrap(), 1);
    assert_eq!(records.build("b2").unwrap().unwrap().reason, Some(late));
    assert_eq!(
        records.builds("t1").unwrap()[0].id,
        "b2",
        "the newest first"
    );
}

#[test]
fn a_tag_refers_to_one_build() {
    let (_dir, records) = records();
    records.insert_build(&a_build("b1", 1)).unwrap();
    records.insert_build(&a_build("b2", 2)).unwrap();
    for build in ["b1", "b2"] {
        records.set_ready(build, &[], "v").unwrap();
    }
    let tags = ["default".to_owned(), "v1".to_owned()];
    records.retag("t1", Some("b1"), &tags).unwrap();
    assert_eq!(records.build("b1").unwrap().unwrap().tags, tags);
    assert!(records.build("b2").unwrap().unwrap().tags.is_empty());
    records.retag("t1", None, &["v1".to_owned()]).unwrap();
    assert_eq!(records.build("b1").unwrap().unwrap().tags, ["default"]);
}

#[tokio::test]
async fn each_of_two_overlapping_builds_gets_the_tags_that_it_requested() {
    let (_dir, records) = records();
    records.insert_build(&a_build("b1", 1)).unwrap();
    records.insert_build(&a_build("b2", 2)).unwrap();
    let tags = |id| records.build(id).unwrap().unwrap().tags;
    let ready = |version: &str| BuildEnd::Ready(Vec::new(), version.to_owned());
    records.end_build("t1", "b1", ready("v1")).await;
    assert_eq!([tags("b1"), tags("b2")], [["default"], ["default"]]);
    records.end_build("t1", "b2", ready("v2")).await;
    assert!(tags("b1").is_empty());
    assert_eq!(tags("b2"), ["default"]);
}

#[test]
fn lines_are_read_in_pages_and_by_level() {
    let (_dir, records) = records();
    records.insert_build(&a_build("b1", 1)).unwrap();
    for n in 0..10 {
        let level = if n % 2 == 0 {
            LogLevel::Debug
        } else {
            LogLevel::Warn
        };
        records
            .insert_log_line("b1", n, level, Some("1"), &format!("line {n}\u{7}"))
            .unwrap();
    }
    let numbers = |from, limit, backwards, level| {
        let which = LogQuery {
            from: LogPosition::Number(from),
            limit,
            backwards,
            level,
        };
        let lines = records.log_lines("b1", which).unwrap();
        lines.into_iter().map(|l| l.number).collect::<Vec<_>>()
    };
    assert_eq!(numbers(8, 100, false, LogLevel::Debug), [8, 9]);
    assert_eq!(numbers(0, 2, false, LogLevel::Info), [1, 3]);
    assert_eq!(numbers(9, 2, true, LogLevel::Debug), [9, 8]);
    assert_eq!(numbers(10, 2, false, LogLevel::Debug), [0_u64; 0]);
    let which = LogQuery {
        from: LogPosition::Number(0),
        limit: 1,
        backwards: false,
        level: LogLevel::Debug,
    };
    // The control character U+0007 was replaced by a space when the line was inserted.
    assert_eq!(
        records.log_lines("b1", which).unwrap()[0].message,
        "line 0 "
    );
    records.delete_template("t1").unwrap();
    assert_eq!(records.build("b1").unwrap(), None);
}

#[test]
fn failed_builds_and_templates_without_builds_are_removed_per_caller() {
    let dir = tempfile::tempdir().unwrap();
    let records = BuildRecords::open(dir.path()).unwrap();
    for n in 0..6_u64 {
        let owner = Some(if n < 5 { "k1" } else { "k2" }.to_owned());
        let template = TemplateRecord {
            id: format!("t{n}"),
            name: format!("name{n}"),
            owner: owner.clone(),
            public: false,
            created_ms: n,
        };
        records.insert_template(&template).unwrap();
        let build = BuildRecord {
            id: format!("b{n}"),
            template: template.id,
            caller: owner,
            tags: Vec::new(),
            size: WantedSize::default(),
            status: if n == 0 {
                BuildStatus::Waiting
            } else {
                BuildStatus::Error
            },
            reason: None,
            steps: Vec::new(),
            version: None,
            created_ms: n,
            changed_ms: n,
        };
        records.insert_build(&build).unwrap();
    }
    records.gc_failed(Some("k1"), 2).unwrap();
    let left = records.templates().unwrap().into_iter().map(|t| t.id);
    assert_eq!(left.collect::<Vec<_>>(), ["t0", "t3", "t4", "t5"]);
    assert_eq!(records.waiting_of(Some("k1")).unwrap(), ["b0"]);
    assert_eq!(records.waiting_of(Some("k2")).unwrap(), [""; 0]);
    assert_eq!(records.waiting_before(1).unwrap(), ["b0"]);
    assert_eq!(records.waiting_before(0).unwrap(), [""; 0]);
}
