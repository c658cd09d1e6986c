//! Hosts that join the fleet with a *token*: a text with which an operator permits hosts to join.

use super::lab::{Lab, Member, TEMPLATES, facts};
use jiffy_fleet::FleetAccess;
use jiffy_fleet::join::join_fleet;
use jiffy_fleet::settings::Settings;
use jiffy_fleet_core::MemberId;

#[tokio::test]
async fn a_host_that_joined_has_certificate_store_keys_and_records() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    let joined = member.join(&home, "two").await.unwrap();
    assert_eq!(joined.settings.member, MemberId(2));
    assert_eq!(joined.admitted_by, MemberId(1));
    assert_eq!(joined.templates, TEMPLATES);
    assert_eq!(
        Settings::load(&home).unwrap().as_ref(),
        Some(&joined.settings)
    );
    let access = FleetAccess::open(&joined.settings, &home, &lab.remote(&home))
        .await
        .unwrap();
    assert_eq!(access.secret, member.access.secret);
    // Any member admits hosts.
    let second = Member::start(&home, joined.settings, access).await;
    let third = second.join(&lab.home("three"), "three").await.unwrap();
    assert_eq!(third.settings.member, MemberId(3));
    assert_eq!(third.admitted_by, MemberId(2));
}

#[tokio::test]
async fn concurrent_joins_have_different_numbers() {
    let lab = Lab::new();
    let member = lab.member().await;
    let mut joins = Vec::new();
    for number in 0..8 {
        let name = format!("host-{number}");
        let (home, options) = (lab.home(&name), member.options(&name).await);
        joins.push(tokio::spawn(async move {
            join_fleet(&home, &options, facts()).await.unwrap()
        }));
    }
    let mut numbers = Vec::new();
    for join in joins {
        numbers.push(join.await.unwrap().settings.member.0);
    }
    numbers.sort_unstable();
    assert_eq!(numbers, [2, 3, 4, 5, 6, 7, 8, 9]);
}

#[tokio::test]
async fn a_join_whose_answer_was_lost_is_repeated_with_the_same_token_and_number() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    let options = member.options("two").await;
    let first = join_fleet(&home, &options, facts()).await.unwrap();
    // As if the answer was lost: the host has no settings of the fleet.
    std::fs::remove_file(home.join("fleet.toml")).unwrap();
    let again = join_fleet(&home, &options, facts()).await.unwrap();
    assert_eq!(again.settings, first.settings);
}

#[tokio::test]
async fn former_store_keys_of_a_host_are_retained() {
    let lab = Lab::new();
    let member = lab.member().await;
    let home = lab.home("two");
    let keys = home.join("store/keys.toml");
    // Opening the store creates keys.
    lab.remote(&home);
    let former = std::fs::read(&keys).unwrap();
    member.join(&home, "two").await.unwrap();
    assert_ne!(std::fs::read(&keys).unwrap(), former);
    let retained = home.join("store/keys.before-fleet.toml");
    assert_eq!(std::fs::read(retained).unwrap(), former);
}
