//! Spelling of template names, and resolution of builds and of templates without a default tag.

use crate::builds::{build_id_of, built, id_of};
use crate::names::{BUILD, create, get, request};
use crate::support::Api;
use jiffy_api::{Limits, Scope};
use jiffy_image::Templates;
use jiffy_template_builder::BuildRecords;
use serde_json::json;

#[tokio::test]
async fn a_template_without_a_default_tag_is_found_by_name_and_id_with_the_id_of_its_build() {
    let api = Api::with_builder().await;
    let (hers, key) = api.key(Scope::Create, Limits::default());
    let (his, _) = api.key(Scope::Create, Limits::default());
    built(&api, "app", &key.key.id, &["v1"]);
    let home = api.home();
    let templates = Templates::new(&home);
    let manifest = templates.manifest(&format!("{}/app:v1", key.key.id));
    let records = BuildRecords::open(home.path()).unwrap();
    let version = manifest.unwrap().version();
    // The template has only the tag `v1`, which refers to a newer build of the same version.
    let mut build = records.build(&build_id_of("app")).unwrap().unwrap();
    build.id = BUILD.strip_prefix("build-").unwrap().to_owned();
    build.tags.clear();
    records.insert_build(&build).unwrap();
    let (template, build) = (build.template, build.id);
    records
        .retag(&template, Some(&build), &["v1".to_owned()])
        .unwrap();
    records.set_ready(&build, &[], &version).unwrap();
    let id = id_of("app");
    for word in ["app", "App", id.as_str()] {
        let path = format!("/templates/{word}");
        let one = get(&api, &hers, &path).await.expect(200);
        assert_eq!(one.text("templateID"), id, "{word}");
        assert_eq!(one.text("buildID"), build, "{word}");
        let tags_path = format!("{path}/tags");
        let tags = get(&api, &hers, &tags_path).await.expect(200);
        let tags = tags.items();
        assert_eq!(tags.len(), 1, "{word}");
        assert_eq!(
            (&tags[0]["tag"], &tags[0]["buildID"]),
            (&json!("v1"), &json!(build))
        );
        let alias = format!("/templates/aliases/{word}");
        get(&api, &hers, &alias).await.expect(200);
        for path in [path, tags_path, alias] {
            let refused = get(&api, &his, &path).await.expect_error(404);
            assert_eq!(refused, "template_not_found", "{path}");
        }
    }
    let listed = get(&api, &hers, "/templates").await.expect(200);
    let listed = listed.items();
    let app = listed.iter().find(|t| t["templateID"] == id.as_str());
    assert_eq!(app.unwrap()["buildID"], build.as_str());
    // A create requires the tag: the name alone means the default tag.
    let refused = create(&api, &hers, "app").await.expect_error(404);
    assert_eq!(refused, "template_not_found");
    // The id of the build refers to exactly that build, for callers that may use the template.
    for word in ["app", id.as_str()] {
        let built = format!("{word}:{build}");
        create(&api, &hers, &built).await.expect(201);
        let refused = create(&api, &his, &built).await.expect_error(404);
        assert_eq!(refused, "template_not_found");
    }
    // This host does not have the version of the build, so that no sandbox can be created from it.
    records.set_ready(&build, &[], "another version").unwrap();
    let refused = create(&api, &hers, &format!("app:{build}")).await;
    assert_eq!(refused.expect_error(404), "template_not_found");
}

#[tokio::test]
async fn names_of_templates_are_lower_cased_and_may_be_long() {
    let api = Api::with_builder().await;
    let requested = request(&api, &api.admin, "Harbor__Task:V1")
        .await
        .expect(202);
    assert_eq!(requested.body["names"], json!(["harbor__task"]));
    assert_eq!(requested.body["tags"], json!(["V1"]));
    let (template, build) = (requested.text("templateID"), requested.text("buildID"));
    let path = format!("/templates/HARBOR__TASK/builds/{build}/status");
    let status = get(&api, &api.admin, &path).await.expect(200);
    assert_eq!(status.text("templateID"), template);
    let longest = "N".repeat(128);
    request(&api, &api.admin, &longest).await.expect(202);
    let longer = format!("{longest}n");
    request(&api, &api.admin, &longer).await.expect(400);
    // Upper-case letters do not bypass the check for stock templates.
    let taken = request(&api, &api.admin, "Base").await.expect_error(409);
    assert_eq!(taken, "name_taken");
}
